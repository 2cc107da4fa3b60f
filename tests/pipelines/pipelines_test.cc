// The program's images compared with diffusers' pipelines: same folder, words and initial noise. Each case runs in its
// own process, as a user would run it.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/pipelines";

const std::string kVideoGoldens = MD_SOURCE_DIR "/tests/golden/wan", kFlowGoldens = MD_SOURCE_DIR "/tests/golden/flux",
                  kFlow2Goldens = MD_SOURCE_DIR "/tests/golden/flux2",
                  kZImageGoldens = MD_SOURCE_DIR "/tests/golden/zimage",
                  kPromptGoldens = MD_SOURCE_DIR "/tests/golden/prompts",
                  kQwenImageGoldens = MD_SOURCE_DIR "/tests/golden/qwenimage",
                  kImageGoldens = MD_SOURCE_DIR "/tests/golden/image_to_image",
                  kRefinerGoldens = MD_SOURCE_DIR "/tests/golden/refiner",
                  kGuidedGoldens = MD_SOURCE_DIR "/tests/golden/guided",
                  kQwenEditGoldens = MD_SOURCE_DIR "/tests/golden/qwenimage_edit",
                  kInversionGoldens = MD_SOURCE_DIR "/tests/golden/inversion",
                  kControlGoldens = MD_SOURCE_DIR "/tests/golden/controls",
                  kAdapterGoldens = MD_SOURCE_DIR "/tests/golden/adapters",
                  kCachedGoldens = MD_SOURCE_DIR "/tests/golden/cached",
                  kLcmGoldens = MD_SOURCE_DIR "/tests/golden/lcm";

/// The goldens in a folder.
const SafetensorsReader& golden(const std::string& root) {
  static std::map<std::string, SafetensorsReader> files;
  auto it = files.find(root);
  if (it == files.end()) it = files.emplace(root, SafetensorsReader::open(root + "/golden.safetensors")).first;
  return it->second;
}

/// ‖a − b‖ / ‖b‖.
double distance(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double difference = 0, size = 0;
  for (size_t i = 0; i < x.size(); ++i) difference += (x[i] - y[i]) * (x[i] - y[i]), size += y[i] * y[i];
  return std::sqrt(difference / size);
}

struct Case {
  std::string root, name, folder;
  std::string golden;  // the case that recorded its noise and results
  bool control = false;
  std::vector<std::string> words;
};
void PrintTo(const Case& c, std::ostream* os) { *os << c.name; }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& root :
       {kGoldens, kVideoGoldens, kFlowGoldens, kFlow2Goldens, kZImageGoldens, kQwenImageGoldens, kQwenEditGoldens,
        kPromptGoldens, kImageGoldens, kGuidedGoldens, kInversionGoldens, kControlGoldens, kRefinerGoldens,
        kAdapterGoldens, kCachedGoldens, kLcmGoldens})
    for (const auto& j : parse_json(read_file(root + "/cases.json")))
      all.push_back({root, j["name"], j["folder"], j.value("same_as", j["name"].get<std::string>()),
                     j.value("control", false), j["words"]});
  return all;
}

class Pipeline : public testing::TestWithParam<Case> {
 protected:
  /// Runs the case with `extra` words in the test's folder.
  Outcome generate(const std::vector<std::string>& extra) {
    const Case& c = GetParam();
    write_safetensors(t / "noise.safetensors", {{"latents", golden(c.root).tensors().at(c.golden + ".noise")}});
    std::vector<std::string> words = {c.control ? "generate_controlnet" : "generate",
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "pretrained_model_name_or_path=" + c.root + "/" + c.folder,
                                      "output_dir=" + t.path(), "latents=" + (t / "noise.safetensors")};
    if (c.control) {
      write_png(t / "control.png", golden(c.root).tensors().at("control"));
      words.push_back("controlnet_model_name_or_path=" + kGoldens +
                      (c.folder == "sd" ? "/controlnet" : "/controlnet_sdxl"));
      words.push_back("controlnet_image=" + (t / "control.png"));
    }
    for (std::string word : c.words) {
      if (word.starts_with("lora_") || word.starts_with("refiner=") || word.starts_with("embeddings=") ||
          word.starts_with("controlnet_model") || word.starts_with("ip_adapter=") || word.starts_with("t2i_adapter="))
        for (size_t i = 0; (i = word.find("{}", i)) != std::string::npos;) word.replace(i, 2, c.root);
      if (word.find("image={}/") != std::string::npos)
        for (size_t i = 0; (i = word.find("{}/", i)) != std::string::npos;) {
          const std::string image = word.substr(i + 3, word.find(".png", i) - i - 3);
          write_png(t / (image + ".png"), golden(c.root).tensors().at(image));
          word.replace(i, 2, t.path());
        }
      words.push_back(word);
    }
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  HostArray tensor(const std::string& file, const std::string& name) {
    return SafetensorsReader::open(t / file).tensors().at(name);
  }
  TemporaryFolder t;
};

TEST(Generate, SaysWhichImageIsNotFinite) {
  TemporaryFolder t;
  std::filesystem::copy(kGoldens + "/sd", t / "model", std::filesystem::copy_options::recursive);
  for (const auto& [file, what] : {std::pair{"vae/diffusion_pytorch_model.safetensors", "the pixels of image 1"},
                                   {"unet/diffusion_pytorch_model.safetensors", "the latents of image 1"}}) {
    HostArrays tensors = SafetensorsReader::open(t / "model/" + file).tensors();
    const std::string name = std::string(file).starts_with("vae") ? "decoder.conv_out.bias" : "conv_out.bias";
    const uint16_t nan[] = {0x7fc0, 0x7fc0, 0x7fc0, 0x7fc0};
    const Shape shape = tensors.at(name).shape();
    tensors[name] = HostArray(shape);
    std::copy_n(reinterpret_cast<const std::byte*>(nan), tensors[name].bytes(), tensors[name].mutable_data());
    write_safetensors(t / "model/" + file, tensors);
    const Outcome o = maxdiffusion({"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "pretrained_model_name_or_path=" + (t / "model"), "output_dir=" + t.path(),
                                    "prompt=heart", "height=16", "width=16", "num_inference_steps=2"});
    EXPECT_EQ(o.status, 5) << o.err;
    EXPECT_TRUE(contains(o.err, std::string(what) + " are not finite")) << o.err;
    EXPECT_FALSE(exists(t / "image_0.png"));
  }
}

// S2-2, S2-8, S2-92…96, S4-43, S4-44, S4-47, S4-79, S4-81, S4-82, S4-84, S4-85, S4-91, S4-93, S4-94, P-23
TEST_P(Pipeline, SamplesAsDiffusersDoes) {
  const Case& c = GetParam();
  const double floor = std::stod(golden(c.root).metadata().at("noise_floor." + c.golden));
  const Outcome o = generate({"output_type=latent"});
  ASSERT_EQ(o.status, 0) << o.err;
  const HostArray latents = tensor("latents.safetensors", "latents");
  const HostArray& want = golden(c.root).tensors().at(c.golden + ".latents");
  ASSERT_EQ(latents.dims(), want.dims());
  const double off = distance(latents, want);
  fmt::print("  latents {:.2g}, noise floor {:.2g}\n", off, floor);
  // Ten times the distance of diffusers' float32 run from float64, but at least 1e-5.
  EXPECT_LE(off, std::max(10 * floor, 1e-5));
  if (const auto steps = golden(c.root).metadata().find("reused." + c.golden);
      steps != golden(c.root).metadata().end()) {
    EXPECT_TRUE(contains(
        o.err, fmt::format("] Cached {}/{} steps (", std::ranges::count(steps->second, 'x'), steps->second.size())))
        << o.err;
    std::string numbers;
    for (size_t i = 0; i < steps->second.size(); ++i)
      if (steps->second[i] == 'x') numbers += fmt::format(" {}", i + 1);
    EXPECT_TRUE(contains(o.err, ":" + numbers + "\n")) << numbers << "\n" << o.err;
  }
  if (c.name == "sd_long_prompt") {
    EXPECT_TRUE(contains(o.err, "is cut")) << o.err;
  }

  for (const auto& [file, name] : {std::pair{"images.safetensors", "images"}, {"video.safetensors", "video"}}) {
    auto media = golden(c.root).tensors().find(c.golden + "." + name);
    if (media == golden(c.root).tensors().end()) continue;
    ASSERT_EQ(generate({"output_type=np"}).status, 0);
    const HostArray generated = tensor(file, name);
    ASSERT_EQ(generated.dims(), media->second.dims());
    // Images pasted back into others were converted to bytes: some of them may round differently.
    const bool bytes = std::ranges::any_of(c.words, [](const auto& w) { return w.starts_with("padding_mask_crop="); });
    EXPECT_LE(distance(generated, media->second), bytes ? 2e-4 : 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, Pipeline, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace md
