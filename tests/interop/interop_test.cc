// What the program writes is read by the packages that people read it with: the scripts tools/check_*.py, with the
// packages of cmake/wheels_interop.txt, which `./run test interop` fetches.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"

namespace md {
namespace {

using Words = std::vector<std::string>;
const std::string kPackages = MD_DEPS_DIR "/interop";
const std::string kImages = MD_SOURCE_DIR "/tests/golden/pipelines/";

class Interop : public testing::Test {
 protected:
  void SetUp() override {
    if (!exists(kPackages + "/torch")) GTEST_SKIP() << "no " << kPackages << ": ./run test interop makes it";
  }
  /// Two steps of training on random data, in a run of this name.
  Outcome train(const std::string& name, const std::string& folder, const Words& more) {
    Words words = {"train",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "run_name=" + name,
                   "output_dir=" + t.path(),
                   "pretrained_model_name_or_path=" + folder,
                   "dataset_type=synthetic",
                   "synthetic_num_samples=2",
                   "per_device_batch_size=1",
                   "max_train_steps=2",
                   "learning_rate=1e-3"};
    words.insert(words.end(), more.begin(), more.end());
    return maxdiffusion(words);
  }
  Outcome check(const std::string& script, const std::string& words) const {
    return shell("cd " + t.path() + " && OMP_NUM_THREADS=1 PYTHONPATH=" + kPackages +
                 " /usr/bin/python3 " MD_SOURCE_DIR "/tools/" + script + " " + words);
  }
  TemporaryFolder t;
};

// S2-116…119, S4-104…107
TEST_F(Interop, DiffusersLoadsCheckpointsWholeAndSamplesAndTensorBoardReadsTheMetrics) {
  ASSERT_EQ(train("run", kImages + "sd", {"resolution=16"}).status, 0);
  const std::string checkpoint = t / "run/checkpoints/2";
  Outcome o = check("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "unet: UNet2DConditionModel, 52,004 parameters\n")) << o.out;
  EXPECT_TRUE(contains(o.out, "StableDiffusionPipeline: 16x16 image")) << o.out;
  // The check can fail.
  auto config = parse_json(read_file(checkpoint + "/unet/config.json"));
  config["num_class_embeds"] = 10;
  write_file_atomic(checkpoint + "/unet/config.json", config.dump());
  o = check("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 1) << o.out << o.err;
  EXPECT_TRUE(contains(o.err, "FAILED unet: missing_keys: ")) << o.err;

  o = check("check_events.py", t / "run");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "ok: 2 steps agree")) << o.out;
  for (const char* tag :
       {"learning/loss", "learning/current_learning_rate", "perf/per_device_tflops", "perf/step_time_seconds"})
    EXPECT_TRUE(contains(o.out, tag)) << o.out;
}

/// A family whose denoiser is a transformer, trained whole and sampled by diffusers' pipeline.
struct Trained {
  const char *name, *folder;
  Words train, check;
  const char* says;
  int lora_pairs;
};
void PrintTo(const Trained& f, std::ostream* os) { *os << f.name; }
class TrainedFamilies : public Interop, public testing::WithParamInterface<Trained> {};

TEST_P(TrainedFamilies, AreLoadedWholeAndSampledByDiffusers) {
  const Trained& family = GetParam();
  Outcome o = train("run", MD_SOURCE_DIR "/tests/golden/" + std::string(family.folder), family.train);
  ASSERT_EQ(o.status, 0) << o.err;
  std::string words = (t / "run/checkpoints/2") + " --steps 2 --max_sequence_length 12";
  for (const std::string& word : family.check) words += " " + word;
  o = check("check_checkpoint.py", words);
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, family.says)) << o.out;
}

INSTANTIATE_TEST_SUITE_P(Interop, TrainedFamilies,
                         testing::Values(Trained{"Wan",
                                                 "wan/t2v",
                                                 {"height=32", "width=32", "num_frames=5", "max_sequence_length=12"},
                                                 {"--size", "32", "--num_frames", "5"},
                                                 "WanPipeline: 32x32 image",
                                                 20},
                                         Trained{"Flux2Klein",
                                                 "flux2/base",
                                                 {"resolution=16", "max_sequence_length=12",
                                                  "text_encoder_out_layers=[1,2,3]"},
                                                 {"--size", "16", "--text_encoder_out_layers", "[1,2,3]"},
                                                 "Flux2KleinPipeline: 16x16 image",
                                                 12},
                                         Trained{"ZImage",
                                                 "zimage/base",
                                                 {"resolution=16", "max_sequence_length=32"},
                                                 {"--size", "16", "--guidance_scale", "2"},
                                                 "ZImagePipeline: 16x16 image",
                                                 16},
                                         Trained{"QwenImage",
                                                 "qwenimage/base",
                                                 {"resolution=16", "max_sequence_length=32"},
                                                 {"--size", "16"},
                                                 "QwenImagePipeline: 16x16 image",
                                                 8}),
                         [](const auto& of) { return std::string(of.param.name); });

TEST_F(Interop, DiffusersReadsEveryKeyOfLoraFilesAndAllOfThemChangeTheSame) {
  ASSERT_EQ(train("run", kImages + "sdxl", {"resolution=16", "train_lora=true", "lora_rank=2"}).status, 0);
  const std::string place = t / "run/checkpoints/2/", peft = place + "pytorch_lora_weights.safetensors";
  Outcome o = check("check_lora.py", kImages + "sdxl " + peft + " " + place + "lora_kohya.safetensors");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "largest distance from pytorch_lora_weights.safetensors: ")) << o.out;
  o = check("check_lora.py", kImages + "sdxl " + peft + " " + kImages + "lora_peft.safetensors");
  EXPECT_EQ(o.status, 1) << "another LoRA changes other weights: " << o.out;
}

TEST_P(TrainedFamilies, HaveLorasOfWhichDiffusersReadsEveryKey) {
  const Trained& family = GetParam();
  const std::string folder = MD_SOURCE_DIR "/tests/golden/" + std::string(family.folder);
  Words words = family.train;
  words.insert(words.end(), {"train_lora=true", "lora_rank=2"});
  Outcome o = train("run", folder, words);
  ASSERT_EQ(o.status, 0) << o.err;
  o = check("check_lora.py", folder + " " + (t / "run/checkpoints/2/pytorch_lora_weights.safetensors"));
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, fmt::format(": {0} pairs change {0} weights", family.lora_pairs))) << o.out;
}

}  // namespace
}  // namespace md
