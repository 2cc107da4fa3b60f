// What the program writes is read by the packages that people read it with: the scripts tools/check_*.py, with the
// packages of cmake/wheels_interop.txt, which `./run test interop` fetches.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"

namespace md {
namespace {

using Words = std::vector<std::string>;
const std::string kPackages = MD_DEPS_DIR "/interop";
const std::string kPictures = MD_SOURCE_DIR "/tests/golden/pipelines/", kVideos = MD_SOURCE_DIR "/tests/golden/wan/";

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
TEST_F(Interop, DiffusersLoadsCheckpointsWholeAndDrawsAndTensorBoardReadsTheMetrics) {
  ASSERT_EQ(train("run", kPictures + "sd", {"resolution=16"}).status, 0);
  const std::string checkpoint = t / "run/checkpoints/2";
  Outcome o = check("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "unet: UNet2DConditionModel, 52,004 parameters\n")) << o.out;
  EXPECT_TRUE(contains(o.out, "StableDiffusionPipeline: 16x16 picture")) << o.out;
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

TEST_F(Interop, DiffusersDrawsVideosWithCheckpoints) {
  ASSERT_EQ(train("run", kVideos + "t2v", {"height=32", "width=32", "num_frames=5", "max_sequence_length=12"}).status,
            0);
  const Outcome o = check("check_checkpoint.py",
                          (t / "run/checkpoints/2") + " --size 32 --num_frames 5 --steps 2 --max_sequence_length 12");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "WanPipeline: 32x32 picture")) << o.out;
}

TEST_F(Interop, DiffusersReadsEveryKeyOfLoraFilesAndAllOfThemChangeTheSame) {
  ASSERT_EQ(train("run", kPictures + "sdxl", {"resolution=16", "train_lora=true", "lora_rank=2"}).status, 0);
  const std::string place = t / "run/checkpoints/2/", peft = place + "pytorch_lora_weights.safetensors";
  Outcome o = check("check_lora.py", kPictures + "sdxl " + peft + " " + place + "lora_kohya.safetensors");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "largest distance from pytorch_lora_weights.safetensors: ")) << o.out;
  o = check("check_lora.py", kPictures + "sdxl " + peft + " " + kPictures + "lora_peft.safetensors");
  EXPECT_EQ(o.status, 1) << "another LoRA changes other weights: " << o.out;
}

}  // namespace
}  // namespace md
