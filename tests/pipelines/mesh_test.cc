// Compares the program's results on a mesh of eight devices with those on one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/pipelines";
const std::vector<std::string> kMesh = {"cpu_device_count=8", "ici_data_parallelism=2", "ici_fsdp_parallelism=2",
                                        "ici_tensor_parallelism=2"};

struct OnEight {
  std::string name;
  std::vector<std::string> words;
  std::string shard;  // of an attention matrix on one device
};

class MeshRuns : public testing::Test {
 protected:
  Outcome run(const std::string& command, const std::string& name, std::vector<std::string> words,
              const std::vector<std::string>& extra = {}) {
    words.insert(words.begin(), {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=" + name,
                                 "pretrained_model_name_or_path=" + kGoldens + "/sd", "resolution=16",
                                 "xla_flags=--xla_backend_optimization_level=0"});  // halves compile time
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  /// Trains four steps on one device and on each mesh of eight devices, with the same global batch.
  void expect_losses_of_one_device(std::vector<std::string> words, const std::vector<OnEight>& meshes) {
    make_folders(t / "pictures");
    for (int i = 0; i < 8; ++i) {
      HostArray rgb(Shape{DType::u8, {16, 16, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(29 * i + static_cast<int>(k % 48) * 5);
      write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
      write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart " + std::to_string(i));
    }
    // Large, so that noise in a gradient near zero does not become a whole step of Adam.
    words.insert(words.end(), {"output_dir=" + t.path(), "train_data_dir=" + (t / "pictures"), "max_train_steps=4",
                               "learning_rate=1e-2", "adam_eps=1e-4", "warmup_steps_fraction=0", "max_grad_norm=0.5",
                               "diffusion_scheduler_config={_class_name: DDIMScheduler}"});
    Outcome o = run("train", "one", words, {"per_device_batch_size=8"});
    ASSERT_EQ(o.status, 0) << o.err;
    const auto one = metrics("one");
    ASSERT_EQ(one.size(), 4u);
    for (size_t i = 1; i < 4; ++i) EXPECT_GT(std::abs(one[i].first / one[0].first - 1), 1e-3) << "nothing is learned";
    for (auto [name, mesh, shard] : meshes) {
      mesh.insert(mesh.end(), {"cpu_device_count=8", "per_device_batch_size=1", "log_sharding=true"});
      o = run("train", name, words, mesh);
      ASSERT_EQ(o.status, 0) << o.err;
      const size_t matrix = o.err.find("attn1.to_q.weight ");
      EXPECT_TRUE(o.err.substr(matrix, o.err.find('\n', matrix) - matrix).ends_with(shard + " on each device"))
          << o.err;
      const auto eight = metrics(name);
      ASSERT_EQ(eight.size(), 4u);
      double loss = 0, norm = 0;
      for (size_t i = 0; i < 4; ++i) {
        loss = std::max(loss, std::abs(eight[i].first / one[i].first - 1));
        norm = std::max(norm, std::abs(eight[i].second / one[i].second - 1));
      }
      std::printf("  %s: losses off by %.2g, norms of gradients by %.2g\n", name.c_str(), loss, norm);
      EXPECT_LE(loss, 1e-5) << name;
      EXPECT_LE(norm, 1e-4) << name;
    }
  }
  /// Loss and gradient norm of every step.
  std::vector<std::pair<double, double>> metrics(const std::string& name) {
    std::vector<std::pair<double, double>> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) {
      const auto json = parse_json(line);
      out.emplace_back(json["loss"], json["grad_norm"]);
    }
    return out;
  }
  TemporaryFolder t;
};

// S1-1, S1-24, S3-20…22, S4-66…68
TEST_F(MeshRuns, ModelsAreTrainedAsOnOneDevice) {
  // One block per level compiles faster than the folder's model.
  std::filesystem::copy(kGoldens + "/sd", t / "model", std::filesystem::copy_options::recursive);
  auto unet = parse_json(read_file(t / "model/unet/config.json"));
  unet.update({{"block_out_channels", {16}},
               {"down_block_types", {"CrossAttnDownBlock2D"}},
               {"up_block_types", {"CrossAttnUpBlock2D"}},
               {"mid_block_type", nullptr}});
  write_file_atomic(t / "model/unet/config.json", unet.dump());
  expect_losses_of_one_device(
      {"pretrained_model_name_or_path=" + (t / "model"), "train_new_unet=true"},
      {{"data", {"ici_data_parallelism=8"}, "f32[16,16]"},
       {"fsdp", {"ici_data_parallelism=1", "ici_fsdp_parallelism=8"}, "f32[16,2]"},
       {"tensor", {"ici_data_parallelism=1", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"}, "f32[8,4]"}});
}

TEST_F(MeshRuns, LoraIsTrainedAsOnOneDevice) {
  expect_losses_of_one_device({"train_lora=true", "lora_rank=2"}, {{"eight", kMesh, "f32[4,4]"}});
  EXPECT_TRUE(exists(t / "eight/checkpoints/4/pytorch_lora_weights.safetensors"));
}

TEST_F(MeshRuns, LossesAndNoiseOfAnotherKindAreThoseOfOneDevice) {
  expect_losses_of_one_device({"train_lora=true", "lora_rank=2", "loss_type=huber", "multires_noise_iterations=4",
                               "debiased_estimation_loss=true", "input_perturbation=0.1"},
                              {{"eight", kMesh, "f32[4,4]"}});
}

TEST_F(MeshRuns, ControlNetSamplesAsOnOneDevice) {
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
  for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(eight[i], one[i], 1e-3) << i;  // values are up to about 30
}

}  // namespace
}  // namespace md
