// Aspect-ratio buckets, masked loss and original sizes through the real program, on tiny model folders.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/picture.h"
#include "tests/cli/command.h"

namespace md {
namespace {

class BucketRuns : public testing::Test {
 protected:
  /// Pictures of two buckets, each with a mask of ones and one of zeros to the left. All tests share the folder and the
  /// programs in it.
  static void SetUpTestSuite() {
    for (const char* folder : {"pictures", "ones", "right", "one_picture"}) make_folders(t / folder);
    int n = 0;
    for (const auto& [h, w] : {std::pair{20, 40}, {40, 20}, {21, 41}, {20, 42}, {22, 40}}) {
      const std::string name = std::to_string(n++);
      put("pictures/" + name, h, w, [n](int64_t y, int64_t x) { return 41 * n + 5 * x + 3 * y; });
      put("ones/" + name, h, w, [](int64_t, int64_t) { return 255; });
      put("right/" + name, h, w, [w = w](int64_t, int64_t x) { return x < w / 2 ? 0 : 255; });
      write_file_atomic(t / ("pictures/" + name + ".txt"), "heart " + name);
    }
    put("one_picture/0", 16, 16, [](int64_t y, int64_t x) { return 7 * x + 2 * y; });
  }
  template <class F>
  static void put(const std::string& name, int64_t h, int64_t w, F value) {
    HostArray rgb(Shape{DType::u8, {h, w, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (int64_t i = 0; i < h * w * 3; ++i)
      v[static_cast<size_t>(i)] = static_cast<uint8_t>(value(i / 3 / w, i / 3 % w));
    write_png(t / (name + ".png"), rgb);
  }
  Outcome train(const std::string& name, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"train",
                                      MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "run_name=" + name,
                                      "output_dir=" + t.path(),
                                      "dataset_save_location=" + (t / "data"),
                                      "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sdxl",
                                      "train_data_dir=" + (t / "pictures"),
                                      "resolution=16",
                                      "per_device_batch_size=2",
                                      "max_train_steps=4",
                                      "learning_rate=1e-3",
                                      "learning_rate_schedule_steps=100",
                                      "diffusion_scheduler_config={_class_name: DDIMScheduler}",
                                      "jax_cache_dir=" + (t / "programs")};
    words.insert(words.end(), more.begin(), more.end());
    return maxdiffusion(words);
  }
  Outcome train_in_buckets(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"enable_bucket=true", "min_bucket_reso=8", "max_bucket_reso=32", "bucket_reso_steps=4"});
    return train(name, more);
  }
  std::vector<double> losses(const std::string& name) {
    std::vector<double> out;
    std::ifstream f(t / (name + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(nlohmann::json::parse(line)["loss"]);
    return out;
  }
  void expect_near(const std::vector<double>& a, const std::vector<double>& b, double relative) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_FALSE(a.empty());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], relative * b[i]) << i;
  }
  void expect_refused(const std::vector<std::string>& words, const std::string& part) {
    const Outcome o = train("refused", words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, part)) << o.err;
  }
  static const TemporaryFolder t;
};

const TemporaryFolder BucketRuns::t;

TEST_F(BucketRuns, CompileEveryBucketAheadAndGoOnAsIfNeverInterrupted) {
  Outcome o = train_in_buckets("whole");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* line : {"bucket 12x20: 1 pictures", "bucket 20x12: 4 pictures",
                           "bucket 12x20: 1 do not fill a batch of 2: it has one every 2 epochs",
                           "train unet 12x20: program compiled", "train unet 20x12: program compiled"})
    EXPECT_TRUE(contains(o.err, line)) << line << "\n" << o.err;
  EXPECT_EQ(losses("whole").size(), 4u);

  ASSERT_EQ(train_in_buckets("parts", {"max_train_steps=2"}).status, 0);
  o = train_in_buckets("parts");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "train unet 20x12: program loaded from the cache")) << o.err;
  EXPECT_FALSE(contains(o.err, "caching latents")) << o.err;
  EXPECT_EQ(losses("parts"), losses("whole"));
  for (const char* file : {"unet/diffusion_pytorch_model.safetensors", "training_state/arrays.safetensors"})
    EXPECT_EQ(read_file(t / ("parts/checkpoints/4/" + std::string(file))),
              read_file(t / ("whole/checkpoints/4/" + std::string(file))));

  // The same order when pictures are encoded in the step.
  o = train_in_buckets("uncached", {"cache_latents_text_encoder_outputs=false"});
  ASSERT_EQ(o.status, 0) << o.err;
  expect_near(losses("uncached"), losses("whole"), 1e-4);
  o = train_in_buckets("drawn", {"cache_latents_text_encoder_outputs=false", "random_flip=true", "random_crop=true",
                                 "max_train_steps=2"});
  ASSERT_EQ(o.status, 0) << o.err;
  ASSERT_EQ(
      train_in_buckets("drawn", {"cache_latents_text_encoder_outputs=false", "random_flip=true", "random_crop=true"})
          .status,
      0);
  ASSERT_EQ(train_in_buckets("drawn_whole",
                             {"cache_latents_text_encoder_outputs=false", "random_flip=true", "random_crop=true"})
                .status,
            0);
  EXPECT_EQ(losses("drawn"), losses("drawn_whole"));

  o = train_in_buckets("smaller", {"bucket_no_upscale=true", "random_flip=true", "max_train_steps=1", "resolution=32",
                                   "train_data_dir=" + (t / "one_picture")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "bucket 16x16: 1 pictures, each also mirrored")) << o.err;
}

TEST_F(BucketRuns, MasksWeighTheLossWithAndWithoutCacheAndBuckets) {
  for (const bool buckets : {true, false}) {  // cached in buckets, and encoded in the step without
    const std::string name = buckets ? "bucket_" : "step_";
    auto run = [&](const std::string& masks) {
      std::vector<std::string> words = {"max_train_steps=2", "random_flip=true", "center_crop=true"};
      if (!buckets) words.push_back("cache_latents_text_encoder_outputs=false");
      if (!masks.empty()) words.insert(words.end(), {"masked_loss=true", "conditioning_data_dir=" + (t / masks)});
      const Outcome o = buckets ? train_in_buckets(name + masks, words) : train(name + masks, words);
      EXPECT_EQ(o.status, 0) << o.err;
      return losses(name + masks);
    };
    const std::vector<double> plain = run(""), ones = run("ones"), right = run("right");
    expect_near(ones, plain, 1e-6);
    ASSERT_EQ(right.size(), 2u);
    EXPECT_NEAR(right[0] / plain[0], 0.5, 0.2) << name;  // about half of the errors are left
  }
}

TEST_F(BucketRuns, SizesAreToldWhereAKeyAsksForThem) {
  const std::vector<std::string> two = {"center_crop=true", "max_train_steps=2"};
  const std::vector<std::string> square = {"train_data_dir=" + (t / "one_picture"), "max_train_steps=2"};
  auto with = [&](const std::string& name, std::vector<std::string> words, const std::string& word) {
    words.push_back(word);
    const Outcome o = train(name, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return losses(name);
  };
  const std::string told = "original_size_conditioning=true", untold = "original_size_conditioning=false";
  EXPECT_NE(with("told", two, told), with("untold", two, untold));
  // A square picture of the resolution is what the default tells of all; one without alpha counts everywhere.
  expect_near(with("square_told", square, told), with("square", square, untold), 1e-6);
  expect_near(with("alpha", square, "alpha_mask=true"), losses("square"), 1e-6);
}

TEST_F(BucketRuns, WhatDoesNotGoTogetherIsRefusedByName) {
  const std::string sd = "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sd";
  expect_refused({"enable_bucket=true", "bucket_reso_steps=6"}, "bucket_reso_steps is 6; expected a multiple of 4");
  expect_refused({"enable_bucket=true", "bucket_reso_steps=4"}, "min_bucket_reso 256");
  expect_refused({"enable_bucket=true", "train_new_vae=true"}, "enable_bucket does not go with train_new_vae");
  expect_refused({"enable_bucket=true", "instance_data_dir=" + (t / "pictures"), "class_data_dir=" + (t / "pictures"),
                  "num_class_images=1", "instance_prompt=x", "class_prompt=x"},
                 "enable_bucket does not go with DreamBooth");
  expect_refused({"masked_loss=true", "alpha_mask=true", "replay_batches=x"},
                 "masked_loss does not go with replay_batches");
  expect_refused({"enable_bucket=true", "dataset_type=tfrecord"}, "enable_bucket does not go with cached latents");
  expect_refused({"original_size_conditioning=true", sd}, "this UNet is not told sizes");
  expect_refused({"masked_loss=true"}, "masked_loss needs masks");
  expect_refused({"conditioning_data_dir=" + (t / "ones")}, "conditioning_data_dir needs masked_loss=true");
  expect_refused({"conditioning_data_dir=" + (t / "ones"), "masked_loss=true", "alpha_mask=true"}, "are both set");
  make_folders(t / "small");
  put("small/0", 9, 9, [](int64_t, int64_t) { return 255; });
  expect_refused(
      {"train_data_dir=" + (t / "one_picture"), "conditioning_data_dir=" + (t / "small"), "masked_loss=true"},
      "one_picture/0.png: it has 9x9 pixels, the picture 16x16");
}

}  // namespace
}  // namespace md
