// Machines, folders and values that do not fit: the program reports each at once and by name.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <tuple>

#include "tests/cli/command.h"
#include "tests/tiny_run.h"

namespace md {
namespace {

namespace fs = std::filesystem;

const std::string kQuickstart = MD_SOURCE_DIR "/configs/quickstart.yml";

/// Output of `maxdiffusion`, which is stopped after `seconds`.
Outcome within(int seconds, const std::vector<std::string>& words, const std::string& environment = "") {
  return maxdiffusion(words, environment + " timeout " + std::to_string(seconds));
}

std::string fifo(const std::string& path) {
  fs::remove(path);
  make_folders(fs::path(path).parent_path());
  EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0) << path;
  return path;
}

/// Command line of a run named `name` that trains the tiny model on nine images of 16 pixels; later words win.
class Robustness : public testing::Test {
 protected:
  Robustness() {
    write_shades(images_, 16);
    write_tiny_model(model_);
  }
  std::vector<std::string> words(const char* command, const std::string& name,
                                 const std::vector<std::string>& extra = {}) const {
    std::vector<std::string> w = {command,
                                  kQuickstart,
                                  "output_dir=" + (t / "runs"),
                                  "run_name=" + name,
                                  "pretrained_model_name_or_path=" + model_,
                                  "dataset_name=",
                                  "train_data_dir=" + images_,
                                  "dataset_save_location=" + (t / "data"),
                                  "resolution=16",
                                  "vae_max_train_steps=1",
                                  "vae_per_device_batch_size=3",
                                  "max_train_steps=2",
                                  "per_device_batch_size=4",
                                  "learning_rate_schedule_steps=100",
                                  "checkpoint_every=-1",
                                  "num_inference_steps=2",
                                  "prompt=[]"};
    w.insert(w.end(), extra.begin(), extra.end());
    return w;
  }
  TemporaryFolder t;
  std::string images_ = t / "images", model_ = t / "model";
};

TEST_F(Robustness, AFifoInPlaceOfAFileIsRefusedAtOnce) {
  const std::string config = fifo(t / "config.yml");
  Outcome o = within(20, {"train", config});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "'" + config + "': not a regular file")) << o.err;
  o = within(20, {"lora", "info", fifo(t / "lora.safetensors")});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "lora.safetensors': not a regular file")) << o.err;
  for (const char* file :
       {"model_index.json", "unet/config.json", "tokenizer/vocab.json", "vae/diffusion_pytorch_model.safetensors"}) {
    const std::string model = t / ("model of " + std::string(file).substr(0, 4));
    write_tiny_model(model);
    const std::string path = fifo(model + "/" + file);
    if (contains(file, "tokenizer/")) write_file_atomic(model + "/tokenizer/merges.txt", "");
    o = within(20, {"generate", kQuickstart, "pretrained_model_name_or_path=" + model, "output_dir=" + (t / "out"),
                    "prompt=x", "resolution=16"});
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, path + "': not a regular file")) << o.err;
  }
}

TEST_F(Robustness, WhatTheEndOfARunNeedsIsCheckedBeforeItsData) {
  const std::string sampled = "prompt=[\"a shade\", \"another\"]";
  write_file_atomic(t / "file", "x");
  const std::tuple<std::vector<std::string>, int, std::string> cases[] = {
      {{sampled, "sample_every=-1", "width=1"}, 2, "resolution=16, width=1: size 16x1 is not a multiple of 2"},
      {{sampled, "sample_every=-1", "num_inference_steps=0"}, 2, "num_inference_steps is 0; expected 1 to"},
      {{sampled, "sample_every=-1", "negative_prompt=[\"a\", \"b\", \"c\"]"},
       2,
       "negative_prompt has 3 texts for 2 prompts"},
      {{sampled, "sample_every=-1", "latents=" + (t / "none.safetensors")}, 4, t / "none.safetensors"},
      {{sampled, "sample_every=-1", "image=" + (t / "none.png")}, 4, t / "none.png"},
      {{"resolution=47"}, 2, "resolution=47: size 47x47 is not a multiple of 2"},
      {{"checkpoint_dir=" + (t / "file/x")}, 4, "'" + (t / "file") + "': not a folder\n  checkpoint_dir is '"},
      {{"metrics_file=" + (t / "file/x")}, 4, "metrics_file is '"},
      {{"output_dir=/proc/self"}, 4, "/proc/self"},
      {{"eval_every=1", "eval_data_dir=" + (t / "nowhere")}, 4, t / "nowhere"},
  };
  for (const auto& [extra, status, text] : cases) {
    const Outcome o = maxdiffusion(words("train", "checked", extra));
    EXPECT_EQ(o.status, status) << o.err;
    EXPECT_TRUE(contains(o.err, text)) << text << "\n" << o.err;
    EXPECT_FALSE(exists(t / "data/cache")) << "data was read: " << o.err;
  }
}

// S3-28
TEST_F(Robustness, CheckNamesAllFaultsOfARunAndWritesNothing) {
  write_file_atomic(images_ + "/broken.png", "no image");
  std::string caption;
  while (caption.size() < 300) caption += "a b c ";
  write_file_atomic(images_ + "/0.txt", caption);
  Outcome o = maxdiffusion(words("check", "fine", {"resolution=32"}));
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* text :
       {"first batch: pixels u8[4,32,32,3]", "10 captions, the longest of 299 bytes; 1 empty",
        "9 images from 16x16 to 16x16", "9 images are smaller than resolution=32 and enlarged; the first is ",
        "broken.png", "caption longer than 32 tokens is cut: \"", "unet: ", "check: no faults found"})
    EXPECT_TRUE(contains(o.err, text)) << text << "\n" << o.err;
  o = maxdiffusion(words("check", "bad",
                         {"prompt=a shade", "sample_every=-1", "width=1", "per_device_batch_size=64",
                          "checkpoint_dir=" + images_ + "/0.png/x"}));
  EXPECT_EQ(o.status, 2) << o.err;
  for (const char* text :
       {"samples: resolution=16, width=1: size 16x1 is not a multiple of 2", "outputs: write into '",
        "checkpoint_dir is '", "weights: per_device_batch_size: a batch of 64 samples; expected at most 10",
        "error: check: 3 faults found; a run would fail"})
    EXPECT_TRUE(contains(o.err, text)) << text << "\n" << o.err;
  EXPECT_FALSE(exists(t / "runs"));
  EXPECT_FALSE(exists(t / "data"));
}

TEST_F(Robustness, AResumedRunNamesTheKeysThatChanged) {
  const std::string before = "in " + (t / "runs/changed/config.yml");
  ASSERT_EQ(maxdiffusion(words("train", "changed")).status, 0);
  const Outcome o = maxdiffusion(words("train", "changed", {"resolution=32", "max_train_steps=1", "noise_offset=0.5"}));
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "resolution is 32, was 16 " + before + "; the new value is used")) << o.err;
  EXPECT_TRUE(contains(o.err, "noise_offset is 0.5, was 0.0 " + before + "; the new value")) << o.err;
  EXPECT_TRUE(contains(o.err, " max_train_steps is 1, was 2 " + before + "\n")) << o.err;
  EXPECT_TRUE(contains(o.err, "nothing to do: the checkpoint is of step 2, max_train_steps is 1")) << o.err;
  int named = 0;
  for (size_t at = 0; (at = o.err.find("; the new value is used", at)) != o.err.npos; ++at) ++named;
  EXPECT_EQ(named, 2) << o.err;  // no other key is
}

TEST_F(Robustness, MissingDevicesAreReportedWithinSeconds) {
  Outcome o = within(20, words("train", "many", {"cpu_device_count=100000"}));
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "cpu_device_count is `100000`, expected a whole number, 1 to 1024")) << o.err;
  for (const auto& [hardware, missing] : {std::pair{"tpu", "no TPU"}, {"gpu", "no NVIDIA GPU"}}) {
    o = within(20, words("train", "absent", {std::string("hardware=") + hardware}),
               "-u TPU_NAME -u TPU_WORKER_ID -u TPU_WORKER_HOSTNAMES -u TPU_ACCELERATOR_TYPE");
    if (o.status == 0) continue;  // this machine has one
    EXPECT_EQ(o.status, 5) << o.err;
    EXPECT_TRUE(contains(o.err, std::string("hardware: ") + hardware + ": this machine has " + missing)) << o.err;
  }
}

TEST_F(Robustness, AFileOverTheLimitOfItsSizeIsAnErrorThatSaysSo) {
  std::string line;
  for (const std::string& w : words("train", "limited")) line += " '" + w + "'";
  const Outcome o =
      shell("ulimit -f 16; exec " MD_BINARY_DIR "/maxdiffusion" + line);  // ulimit counts blocks of 1 KiB or 512 bytes
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "File too large")) << o.err;
  EXPECT_TRUE(contains(o.err, "ulimit -f")) << o.err;
}

TEST_F(Robustness, FilesThatAreNotWeightsAreNamedAsWhatTheyAre) {
  const std::pair<std::string, std::string> files[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "a git-lfs pointer"},
      {"<!DOCTYPE html>\n<html></html>", "an HTML page"},
      {"GGUF\3\1\1\1\1", "GGUF of version 16843011; expected 2 or 3"},
      {"learning_rate: 1\n", "a text that begins with 'learning_rate: 1'; expected safetensors"}};
  for (const auto& [bytes, text] : files) {
    write_file_atomic(t / "some.safetensors", bytes);
    const Outcome o = maxdiffusion({"lora", "info", t / "some.safetensors"});
    EXPECT_EQ(o.status, 4) << o.err;
    EXPECT_TRUE(contains(o.err, "some.safetensors': " + text)) << o.err;
  }
  const Outcome o = maxdiffusion({"lora", "info"});
  EXPECT_TRUE(contains(o.err, "lora info: one path is needed")) << o.err;
}

TEST_F(Robustness, GenerateChecksItsKeysBeforeItDenoisesAndNamesADamagedTensorAfter) {
  ASSERT_EQ(maxdiffusion(words("train", "damaged")).status, 0);
  const std::string model = t / "runs/damaged/checkpoints/2",
                    file = model + "/unet/diffusion_pytorch_model.safetensors";
  const auto generate = [&](const std::string& word) {
    return maxdiffusion(words("generate", "", {"prompt=a shade", "pretrained_model_name_or_path=" + model, word}));
  };
  const std::tuple<std::string, int, std::string> cases[] = {
      {"width=1", 2, "resolution=16, width=1: size 16x1"},
      {"output_dir=/proc/self", 4, "write into '/proc/self'"},
      {"negative_prompt=[\"a\", \"b\"]", 2, "negative_prompt has 2 texts for 1 prompts"}};
  for (const auto& [word, status, text] : cases) {
    const Outcome o = generate(word);
    EXPECT_EQ(o.status, status) << o.err;
    EXPECT_TRUE(contains(o.err, text)) << text << "\n" << o.err;
    EXPECT_FALSE(contains(o.err, "encoded after")) << o.err;
  }
  std::string bytes = read_file(file);
  bytes.replace(bytes.size() - 4, 4, std::string("\0\0\xc0\x7f", 4));  // the last float of the last tensor
  fs::remove(file);                                                    // may be a link
  write_file_atomic(file, bytes);
  fs::remove_all(model + "/training_state");  // its checksums would name the file first
  const Outcome o = generate("seed=1");
  EXPECT_EQ(o.status, 5) << o.err;
  EXPECT_TRUE(contains(o.err, "are not finite")) << o.err;
  EXPECT_TRUE(contains(o.err, " in " + file + " holds a number that is not finite, the first at index ")) << o.err;
}

TEST_F(Robustness, LittleAddressSpaceIsAnErrorNotASignal) {
  if (!kAddressSpaceCanBeLimited) GTEST_SKIP() << "the sanitizer reserves more than this test allows";
  std::string line;
  for (const std::string& w : words("train", "small")) line += " '" + w + "'";
  for (const int kib : {250'000, 300'000, 450'000, 650'000, 900'000, 1'200'000}) {
    fs::remove_all(t / "runs");
    const Outcome o = shell("ulimit -v " + std::to_string(kib) + "; exec " MD_BINARY_DIR "/maxdiffusion" + line);
    EXPECT_TRUE(o.status == 0 || o.status == 4 || o.status == 6) << kib << " KiB: status " << o.status << "\n" << o.err;
    EXPECT_FALSE(contains(o.err, "defect of the program")) << o.err;
    if (kib > 900'000) continue;
    EXPECT_EQ(o.status, 6) << kib << "\n" << o.err;
    EXPECT_TRUE(contains(o.err, "MiB of address space; at least 1024 are needed")) << kib << "\n" << o.err;
  }
}

}  // namespace
}  // namespace md
