// What the program writes, judged by the libraries that people read it with: the scripts tools/check_*.py, run by the
// Python that MD_JUDGE names, or that bench/compare.py has made in .judge/. Without one, tests say so and are skipped.
#include <gtest/gtest.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "tests/cli/command.h"

namespace md {
namespace {

using Words = std::vector<std::string>;
const std::string kPictures = MD_SOURCE_DIR "/tests/golden/pipelines/", kVideos = MD_SOURCE_DIR "/tests/golden/wan/";

class Judged : public testing::Test {
 protected:
  /// Why these modules cannot be asked; empty: they can.
  static std::string missing(const std::string& modules) {
    if (python().empty())
      return "no judge: set MD_JUDGE to a Python that has " + modules + ", or let ./run bench make .judge/";
    if (shell(python() + " -c 'import " + modules + "'").status == 0) return "";
    return python() + " cannot import " + modules + ": pip install -r bench/requirements.txt";
  }
  static std::string python() {
    const char* named = std::getenv("MD_JUDGE");
    const std::string made = MD_SOURCE_DIR "/.judge/bin/python";
    return named && *named ? named : exists(made) ? made : "";
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
  Outcome judge(const std::string& script, const std::string& words) const {
    return shell("cd " + t.path() + " && OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= " + python() +
                 " " MD_SOURCE_DIR "/tools/" + script + " " + words);
  }
  TemporaryFolder t;
};

TEST_F(Judged, DiffusersLoadsCheckpointsWholeAndDrawsAndTensorBoardReadsTheMetrics) {
  if (const std::string why = missing("torch, diffusers, transformers"); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(train("run", kPictures + "sd", {"resolution=16"}).status, 0);
  const std::string checkpoint = t / "run/checkpoints/2";
  Outcome o = judge("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "unet: UNet2DConditionModel, 52,004 parameters\n")) << o.out;
  EXPECT_TRUE(contains(o.out, "StableDiffusionPipeline: 16x16 picture")) << o.out;
  // A judge that finds nothing wrong with anything is none.
  auto config = parse_json(read_file(checkpoint + "/unet/config.json"));
  config["num_class_embeds"] = 10;
  write_file_atomic(checkpoint + "/unet/config.json", config.dump());
  o = judge("check_checkpoint.py", checkpoint + " --size 16 --steps 2");
  EXPECT_EQ(o.status, 1) << o.out << o.err;
  EXPECT_TRUE(contains(o.err, "FAILED unet: missing_keys: ")) << o.err;

  if (const std::string why = missing("tensorboard"); !why.empty()) GTEST_SKIP() << why;
  o = judge("check_events.py", t / "run");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "ok: 2 steps agree")) << o.out;
}

TEST_F(Judged, DiffusersDrawsVideosWithCheckpoints) {
  if (const std::string why = missing("torch, diffusers, transformers, ftfy"); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(train("run", kVideos + "t2v", {"height=32", "width=32", "num_frames=5", "max_sequence_length=12"}).status,
            0);
  const Outcome o = judge("check_checkpoint.py",
                          (t / "run/checkpoints/2") + " --size 32 --num_frames 5 --steps 2 --max_sequence_length 12");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "WanPipeline: 32x32 picture")) << o.out;
}

TEST_F(Judged, DiffusersReadsEveryKeyOfLoraFilesAndAllOfThemChangeTheSame) {
  if (const std::string why = missing("torch, diffusers, transformers, peft"); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(train("run", kPictures + "sdxl", {"resolution=16", "train_lora=true", "lora_rank=2"}).status, 0);
  const std::string place = t / "run/checkpoints/2/", peft = place + "pytorch_lora_weights.safetensors";
  Outcome o = judge("check_lora.py", kPictures + "sdxl " + peft + " " + place + "lora_kohya.safetensors");
  EXPECT_EQ(o.status, 0) << o.out << o.err;
  EXPECT_TRUE(contains(o.out, "largest distance from pytorch_lora_weights.safetensors: ")) << o.out;
  o = judge("check_lora.py", kPictures + "sdxl " + peft + " " + kPictures + "lora_peft.safetensors");
  EXPECT_EQ(o.status, 1) << "another LoRA changes other weights: " << o.out;
}

}  // namespace
}  // namespace md
