#include "maxdiffusion/settings/foreign_image.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/sampler_names.h"

namespace md {
namespace {

using Keys = std::map<std::string, std::string>;
using Texts = std::vector<std::string>;

TEST(ForeignImage, TheWebUisTextIsReadAsKeys) {
  const ForeignSettings s = settings_of_web_ui(
      "a cat, Steps: nice\nNegative prompt: bad, ugly\nsecond line\nSteps: 3, Sampler: DPM++ 2M, Schedule type: "
      "Karras, "
      "CFG scale: 7, Seed: 5, Size: 64x96, Clip skip: 2, Wildcard prompt: \"one\\ntwo, Seed: 9\", Version: v1.10.1");
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a cat, Steps: nice\""},
                          {"negative_prompt", "\"bad, ugly\\nsecond line\""},
                          {"num_inference_steps", "3"},
                          {"scheduler", "\"dpmpp_2m\""},
                          {"sigma_schedule", "\"karras\""},
                          {"guidance_scale", "7"},
                          {"sample_seed", "5"},
                          {"width", "64"},
                          {"height", "96"},
                          {"clip_skip", "1"}}));
  EXPECT_EQ(s.unused, (Texts{"Wildcard prompt: one\ntwo, Seed: 9", "Version: v1.10.1"}));
  EXPECT_EQ(s.prompt_syntax, "a1111");
  EXPECT_EQ(s.automatic_schedule, "");
}

TEST(ForeignImage, OlderTextsForgesAndSecondPassesAreReadToo) {
  ForeignSettings s = settings_of_web_ui("x\nSteps: 20, Sampler: DPM++ 2M SDE Karras, CFG scale: 7.5, Seed: 1");
  EXPECT_EQ(s.keys.at("scheduler"), "\"dpmpp_2m_sde_karras\"");
  EXPECT_FALSE(s.keys.contains("sigma_schedule") || s.keys.contains("negative_prompt"));
  EXPECT_EQ(s.unused, Texts());
  s = settings_of_web_ui(
      "x\nSteps: 20, Sampler: DPM++ SDE, Schedule type: Automatic, CFG scale: 1, Distilled CFG Scale: 3.5, Seed: 1, "
      "Denoising strength: 0.5, Hires upscale: 2, Hires upscaler: Latent");
  EXPECT_EQ(s.automatic_schedule, "karras");
  EXPECT_EQ(s.keys.at("guidance_scale"), "3.5");
  EXPECT_EQ(s.keys.at("true_cfg_scale"), "1");
  EXPECT_EQ(s.keys.at("hires_scale"), "2");
  EXPECT_EQ(s.keys.at("hires_strength"), "0.5");
  EXPECT_EQ(s.keys.at("hires_upscaler"), "latent");
  s = settings_of_web_ui("x\nSteps: 20, Sampler: Fast One, CFG scale: high, Seed: 1, Denoising strength: 0.5");
  EXPECT_EQ(s.unused, (Texts{"Sampler: Fast One", "CFG scale: high", "Denoising strength: 0.5"}));
  s = settings_of_web_ui("a, b: c\nd");  // no line of settings
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a, b: c\\nd\""}}));
}

TEST(ForeignImage, ComfyUisGraphIsReadFromItsSamplingNode) {
  const ForeignSettings s = settings_of_comfyui(R"({
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "x.safetensors"}},
    "3": {"class_type": "KSampler", "inputs": {"seed": 12, "steps": 9, "cfg": 6.5, "sampler_name": "euler_ancestral",
          "scheduler": "normal", "denoise": 1.0, "model": ["1", 0], "positive": ["8", 0], "negative": ["7", 0],
          "latent_image": ["5", 0]}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 96, "height": 64, "batch_size": 2}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a \"cat\"", "clip": ["1", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "bad", "clip": ["1", 1]}},
    "8": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["6", 0]}},
    "9": {"class_type": "VAEDecode", "inputs": {}}, "10": {"class_type": "SaveImage", "inputs": {}}})",
                                                "x.png");
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a \\\"cat\\\"\""},
                          {"negative_prompt", "\"bad\""},
                          {"num_inference_steps", "9"},
                          {"scheduler", "\"euler_ancestral\""},
                          {"sigma_schedule", "\"training\""},
                          {"guidance_scale", "3.5"},
                          {"sample_seed", "12"},
                          {"num_images_per_prompt", "2"},
                          {"width", "96"},
                          {"height", "64"}}));
  EXPECT_EQ(s.unused, Texts{"node CheckpointLoaderSimple"});
  EXPECT_EQ(s.prompt_syntax, "comfyui");
  for (const char* text : {"no JSON", "[1]", "{}", R"({"1": {"inputs": 3}})"})
    EXPECT_THROW(settings_of_comfyui(text, "x.png"), Error) << text;
  // A link that leads back ends.
  EXPECT_FALSE(settings_of_comfyui(R"({"1": {"inputs": {"sampler_name": "euler", "positive": ["2", 0]}},
                                       "2": {"inputs": {"conditioning": ["2", 0]}}})",
                                   "x.png")
                   .keys.contains("prompt"));
}

TEST(ForeignImage, TheWebUisFieldsAreItsInterfaces) {
  EXPECT_EQ(fields_of_web_ui("a cat\nNegative prompt: bad\nSteps: 3, Size: 64x96, Note: \"a, b\", Seed: 5"),
            (std::vector<std::pair<std::string, std::string>>{{"Prompt", "a cat"},
                                                              {"Negative prompt", "bad"},
                                                              {"Steps", "3"},
                                                              {"Size-1", "64"},
                                                              {"Size-2", "96"},
                                                              {"Note", "a, b"},
                                                              {"Seed", "5"}}));
}

TEST(ForeignImage, TheTextSaysWhichProgramMadeTheImage) {
  EXPECT_FALSE(foreign_settings({{"Software", "x"}}, "x.png"));
  EXPECT_EQ(foreign_settings({{"parameters", "a cat"}, {"prompt", "{}"}}, "x.png")->keys.at("prompt"), "\"a cat\"");
  EXPECT_THROW(foreign_settings({{"prompt", "{}"}}, "x.png"), Error);
}

TEST(ForeignImage, AutomaticLevelsAreTheWebUis) {
  for (const char* name : {"dpmpp_2m", "dpmpp_sde", "dpmpp_2s_ancestral", "dpm2", "dpm2_ancestral", "restart"})
    EXPECT_EQ(automatic_schedule(name), "karras") << name;
  for (const char* name : {"dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde"})
    EXPECT_EQ(automatic_schedule(name), "exponential") << name;
  for (const char* name : {"euler", "euler_ancestral", "heun", "lms", "ddim", "unipc", ""})
    EXPECT_EQ(automatic_schedule(name), "") << name;
}

}  // namespace
}  // namespace md
