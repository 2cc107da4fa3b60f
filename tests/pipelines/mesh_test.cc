// What the programs write on a mesh of eight devices, beside what they write on one.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/image.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/pipelines";
const std::vector<std::string> kMesh = {"cpu_device_count=8", "ici_data_parallelism=2", "ici_fsdp_parallelism=2",
                                        "ici_tensor_parallelism=2"};

class MeshRuns : public testing::Test {
 protected:
  Outcome run(const std::string& command, const std::string& name, std::vector<std::string> words,
              const std::vector<std::string>& more = {}) {
    words.insert(words.begin(), {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=" + name,
                                 "pretrained_model_name_or_path=" + kGoldens + "/sd", "resolution=16",
                                 "xla_flags=--xla_backend_optimization_level=0"});  // half the time to compile
    words.insert(words.end(), more.begin(), more.end());
    return maxdiffusion(words);
  }
  TemporaryFolder t;
};

TEST_F(MeshRuns, LoraIsTrainedAsOnOneDevice) {
  make_folders(t / "pictures");
  for (int i = 0; i < 8; ++i) {
    HostArray rgb(Shape{DType::u8, {16, 16, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(29 * i + static_cast<int>(k % 48) * 5);
    write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
    write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart " + std::to_string(i));
  }
  const std::vector<std::string> words = {"output_dir=" + t.path(),
                                          "train_data_dir=" + (t / "pictures"),
                                          "train_lora=true",
                                          "lora_rank=2",
                                          "max_train_steps=4",
                                          "learning_rate=1e-2",
                                          "diffusion_scheduler_config={_class_name: DDIMScheduler}"};
  std::vector<std::string> mesh = kMesh;
  mesh.push_back("per_device_batch_size=1");
  Outcome o = run("train", "one", words, {"per_device_batch_size=8"});
  ASSERT_EQ(o.status, 0) << o.err;
  o = run("train", "eight", words, mesh);
  ASSERT_EQ(o.status, 0) << o.err;
  auto losses = [&](const std::string& name) {
    std::vector<double> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(nlohmann::json::parse(line)["loss"]);
    return out;
  };
  const std::vector<double> one = losses("one"), eight = losses("eight");
  ASSERT_EQ(one.size(), 4u);
  ASSERT_EQ(eight.size(), 4u);
  // Sums over devices round differently; Adam's first steps make that a difference of about 1e-5 of a weight.
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(eight[i], one[i], 1e-4 * one[i]) << i;
  EXPECT_NE(one[0], one[3]);
  EXPECT_TRUE(exists(t / "eight/checkpoints/4/pytorch_lora_weights.safetensors"));
}

TEST_F(MeshRuns, ControlNetDrawsAsOnOneDevice) {
  HostArray rgb(Shape{DType::u8, {16, 16, 3}});
  auto v = rgb.mutable_view<uint8_t>();
  for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(k * 37);
  write_png(t / "control.png", rgb);
  const std::vector<std::string> words = {"prompt=heart",
                                          "num_inference_steps=3",
                                          "height=16",
                                          "width=16",
                                          "controlnet_model_name_or_path=" + kGoldens + "/controlnet",
                                          "controlnet_image=" + (t / "control.png"),
                                          "num_images_per_prompt=8",
                                          "output_type=latent"};
  std::vector<std::string> mesh = kMesh;
  mesh.push_back("output_dir=" + (t / "eight"));
  mesh.push_back("per_device_batch_size=1");
  Outcome o = run("generate_controlnet", "", words, {"output_dir=" + (t / "one"), "per_device_batch_size=8"});
  ASSERT_EQ(o.status, 0) << o.err;
  o = run("generate_controlnet", "", words, mesh);
  ASSERT_EQ(o.status, 0) << o.err;
  auto latents = [&](const std::string& name) {
    return SafetensorsReader::open(t / (name + "/latents.safetensors")).tensors().at("latents").to_doubles();
  };
  const std::vector<double> one = latents("one"), eight = latents("eight");
  ASSERT_EQ(one.size(), eight.size());
  ASSERT_EQ(one.size(), 8u * 4 * 8 * 8);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(eight[i], one[i], 1e-3) << i;  // of values up to 30 or so
}

}  // namespace
}  // namespace md
