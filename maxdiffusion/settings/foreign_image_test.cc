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
  s = settings_of_web_ui("x\nSteps: 20, Sampler: DDIM, Schedule type: Karras, Seed: 18446744073709551615");
  EXPECT_EQ(s.keys.at("sample_seed"), "18446744073709551615");
  EXPECT_EQ(s.keys.at("scheduler"), "\"ddim\"");
  EXPECT_FALSE(s.keys.contains("sigma_schedule"));
  EXPECT_EQ(s.unused, Texts{"Schedule type: Karras"});  // DDIM steps over timesteps
  s = settings_of_web_ui("a, b: c\nd");                 // no line of settings
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a, b: c\\nd\""}}));
}

TEST(ForeignImage, LinesOfExtensionsStandBehindTheSettings) {
  const ForeignSettings s = settings_of_web_ui(
      "a red cat\nNegative prompt: bad\nSteps: 20, Sampler: Euler a Karras, CFG scale: 7, Seed: 1\n"
      "Template: a {red|blue} cat, x: 1, y: 2\nNegative Template: bad");
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a red cat\""},
                          {"negative_prompt", "\"bad\""},
                          {"num_inference_steps", "20"},
                          {"scheduler", "\"euler_ancestral\""},
                          {"sigma_schedule", "\"karras\""},
                          {"guidance_scale", "7"},
                          {"sample_seed", "1"}}));
  EXPECT_EQ(s.unused, (Texts{"Template: a {red|blue} cat, x: 1, y: 2", "Negative Template: bad"}));
}

TEST(ForeignImage, TitlesOfTheWebUiMayEndWithASchedule) {
  const auto names = [](const std::string& title) {
    const WebUiSampler s = web_ui_sampler(title);
    return s.name + " " + s.schedule;
  };
  EXPECT_EQ(names("DPM++ 2M Karras"), "dpmpp_2m_karras ");
  EXPECT_EQ(names("Euler a Karras"), "euler_ancestral karras");
  EXPECT_EQ(names("Restart SGM Uniform"), "restart sgm_uniform");
  EXPECT_EQ(names("k_dpm_2_a"), "dpm2_ancestral ");
  EXPECT_EQ(names("k_euler"), "euler ");
  EXPECT_EQ(names("Fast One Karras"), " ");
  EXPECT_EQ(names(""), " ");
  for (const auto& [title, name] : {std::pair{"Uniform", "training"},
                                    {"uniform", "training"},
                                    {"Normal", "training"},
                                    {"KARRAS", "karras"},
                                    {"SGM Uniform", "sgm_uniform"},
                                    {"SGMUniform", "sgm_uniform"},
                                    {"KL Optimal", "kl_optimal"},
                                    {"align_your_steps", "ays_sd15"},
                                    {"Align Your Steps", "ays_sd15"},
                                    {"Align Your Steps XL", "ays_sdxl"},
                                    {"ays_sdxl", "ays_sdxl"},
                                    {"Align Your Steps GITS", "gits"},
                                    {"Polyexponential", ""},
                                    {"", ""}})
    EXPECT_EQ(schedule_named(title), name) << title;
  EXPECT_EQ(schedule_named("Align Your Steps", true), "ays_sdxl");
}

TEST(ForeignImage, ComfyUisGraphIsReadFromTheFirstPass) {
  // The second pass has the smaller id as a text; both conditionings come from one node, and inputs from other nodes.
  const ForeignSettings s = settings_of_comfyui(R"({
    "3": {"class_type": "KSampler", "is_changed": [NaN], "inputs": {"seed": ["20", 0], "steps": 9, "cfg": 6.5,
          "sampler_name": "dpmpp_2m", "scheduler": "karras", "denoise": 1.0, "model": ["1", 0], "positive": ["9", 0],
          "negative": ["9", 1], "latent_image": ["5", 0]}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": ["21", 0], "height": ["22", 0], "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": ["23", 0], "clip": ["1", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "bad", "clip": ["1", 1]}},
    "9": {"class_type": "ControlNetApplyAdvanced", "inputs": {"positive": ["6", 0], "negative": ["7", 0], "strength": 1}},
    "10": {"class_type": "LatentUpscale", "inputs": {"samples": ["3", 0], "width": 512, "height": 512}},
    "11": {"class_type": "KSampler", "inputs": {"seed": 99, "steps": 3, "cfg": 2, "sampler_name": "euler",
           "scheduler": "normal", "denoise": 0.5, "positive": ["9", 0], "negative": ["9", 1], "latent_image": ["10", 0]}},
    "20": {"class_type": "Seed Everywhere", "inputs": {
  "seed" : 12}},
    "21": {"class_type": "PrimitiveInt", "inputs": {"value": 96}},
    "22": {"class_type": "GetImageSize", "inputs": {"image": ["1", 0]}},
    "23": {
  "class_type" : "PrimitiveString", "inputs" : { "value" : "a cat" }
}
})",
                                                "x.png");
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a cat\""},
                          {"negative_prompt", "\"bad\""},
                          {"num_inference_steps", "9"},
                          {"scheduler", "\"dpmpp_2m\""},
                          {"sigma_schedule", "\"karras\""},
                          {"guidance_scale", "6.5"},
                          {"sample_seed", "12"},
                          {"num_images_per_prompt", "1"},
                          {"width", "96"}}));
  EXPECT_EQ(s.unused, (Texts{"height of another node", "node LatentUpscale", "node KSampler", "node GetImageSize",
                             "node ControlNetApplyAdvanced"}));
}

TEST(ForeignImage, ComfyUisCustomSamplerHasItsSettingsInNodesOfTheirOwn) {
  const ForeignSettings s = settings_of_comfyui(R"({
    "6": {"class_type": "CLIPTextEncodeFlux", "inputs": {"clip_l": "a cat", "t5xxl": "a large cat", "guidance": 3.5}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["13", 0]}},
    "13": {"class_type": "SamplerCustomAdvanced", "inputs": {"noise": ["25", 0], "guider": ["22", 0], "sampler": ["16", 0],
           "sigmas": ["17", 0], "latent_image": ["27", 0]}},
    "16": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
    "17": {"class_type": "BasicScheduler", "inputs": {"scheduler": "simple", "steps": 20, "denoise": 1, "model": ["30", 0]}},
    "22": {"class_type": "BasicGuider", "inputs": {"model": ["30", 0], "conditioning": ["6", 0]}},
    "25": {"class_type": "RandomNoise", "inputs": {"noise_seed": 219670278747233}},
    "27": {"class_type": "EmptySD3LatentImage", "inputs": {"width": 1024, "height": 512, "batch_size": 1}},
    "30": {"class_type": "ModelSamplingFlux", "inputs": {"max_shift": 1.15}}})",
                                                "x.png");
  EXPECT_EQ(s.keys, (Keys{{"prompt", "\"a cat\""},
                          {"prompt_2", "\"a large cat\""},
                          {"num_inference_steps", "20"},
                          {"scheduler", "\"euler\""},
                          {"sigma_schedule", "\"simple\""},
                          {"guidance_scale", "3.5"},
                          {"sample_seed", "219670278747233"},
                          {"num_images_per_prompt", "1"},
                          {"width", "1024"},
                          {"height", "512"}}));
  EXPECT_EQ(s.unused, Texts{"node ModelSamplingFlux"});
  // A guider with guidance; an image to begin with; the unconditional prediction without a text; a part of the steps.
  const ForeignSettings other = settings_of_comfyui(R"({
    "1": {"class_type": "SamplerCustomAdvanced", "inputs": {"guider": ["2", 0], "sampler": ["3", 0], "sigmas": ["4", 0],
          "latent_image": ["5", 0]}},
    "2": {"class_type": "CFGGuider", "inputs": {"positive": ["6", 0], "negative": ["7", 0], "cfg": 4}},
    "3": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "lcm"}},
    "4": {"class_type": "BasicScheduler", "inputs": {"scheduler": "linear_quadratic", "steps": 8, "denoise": 0.6}},
    "5": {"class_type": "VAEEncode", "inputs": {"pixels": ["8", 0]}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a dog"}},
    "7": {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["6", 0]}},
    "8": {"class_type": "LoadImage", "inputs": {"image": "a.png"}}})",
                                                    "x.png");
  EXPECT_EQ(
      other.keys,
      (Keys{{"prompt", "\"a dog\""}, {"num_inference_steps", "8"}, {"scheduler", "\"lcm\""}, {"guidance_scale", "4"}}));
  EXPECT_EQ(other.unused,
            (Texts{"denoise: 0.6", "Schedule type: linear_quadratic", "node VAEEncode", "node LoadImage"}));
  EXPECT_EQ(settings_of_comfyui(R"({"1": {"class_type": "KSamplerAdvanced", "inputs": {"noise_seed": 3, "steps": 20,
              "start_at_step": 0, "end_at_step": 16, "sampler_name": "euler", "positive": ["2", 0]}},
              "2": {"class_type": "T2I", "inputs": {}}})",
                                "x.png")
                .unused,
            (Texts{"end_at_step: 16", "prompt of another node", "node T2I"}));
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
  try {
    foreign_settings({{"parameters", R"({"sui_image_params": {"prompt": "a cat"}})"}}, "x.png");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.message(),
              "'x.png': its text `parameters` is JSON, as SwarmUI and Fooocus write it; expected the web UI's text: a "
              "prompt, and a line with 'Steps: …'");
  }
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
