// Aspect-ratio buckets, masked loss and original-size conditioning through the real program, on tiny model folders.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

class BucketRuns : public testing::Test {
 protected:
  /// Writes images of two buckets and images of one, each with an all-ones mask and a mask with zeros on the left. All
  /// tests share the folder.
  static void SetUpTestSuite() {
    for (const char* folder : {"pictures", "wide", "ones", "right", "square", "small_wide"}) make_folders(t / folder);
    int n = 0;
    for (const auto& [h, w] : {std::pair{20, 40}, {40, 20}, {21, 41}, {20, 42}, {22, 40}}) {
      const std::string name = std::to_string(n++);
      for (const char* folder : {"pictures/", "wide/"}) {
        if (w < h && folder == std::string("wide/")) continue;
        put(folder + name, h, w, [n = int64_t{n}](int64_t y, int64_t x) { return 41 * n + 5 * x + 3 * y; });
        write_file_atomic(t / (folder + name + ".txt"), "heart " + name);
      }
      put("ones/" + name, h, w, [](int64_t, int64_t) { return 255; });
      put("right/" + name, h, w, [w = w](int64_t, int64_t x) { return x < w / 2 ? 0 : 255; });
    }
    put("square/0", 16, 16, [](int64_t y, int64_t x) { return 7 * x + 2 * y; });
    put("small_wide/0", 12, 20, [](int64_t y, int64_t x) { return 7 * x + 2 * y; });
  }
  template <class F>
  static void put(const std::string& name, int64_t h, int64_t w, F value) {
    HostArray rgb(Shape{DType::u8, {h, w, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (int64_t i = 0; i < h * w * 3; ++i)
      v[static_cast<size_t>(i)] = static_cast<uint8_t>(value(i / 3 / w, i / 3 % w));
    write_png(t / (name + ".png"), rgb);
  }
  Outcome train(const std::string& name, const std::vector<std::string>& extra) {
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
                                      "xla_flags=--xla_backend_optimization_level=0"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  Outcome train_in_buckets(const std::string& name, std::vector<std::string> extra = {}) {
    extra.insert(extra.begin(),
                 {"enable_bucket=true", "min_bucket_reso=8", "max_bucket_reso=32", "bucket_reso_steps=4"});
    return train(name, extra);
  }
  /// The values of `metric` at every step.
  static std::vector<double> values_of(const std::string& run, const std::string& metric) {
    std::vector<double> out;
    std::ifstream f(t / (run + "/metrics.jsonl"));
    for (std::string line; std::getline(f, line);) out.push_back(parse_json(line).at(metric));
    return out;
  }
  static void expect_near(const std::vector<double>& a, const std::vector<double>& b, double relative) {
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

// P-6
TEST_F(BucketRuns, CompileEveryBucketAheadAndGoOnAsIfNeverInterrupted) {
  const std::string programs = "jax_cache_dir=" + (t / "programs");  // starts empty: both programs are compiled
  Outcome o = train_in_buckets("whole", {programs});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* line : {"bucket 12x20: 1 images", "bucket 20x12: 4 images",
                           "bucket 12x20: 1 samples, fewer than a batch of 2: one batch every 2 epochs",
                           "train unet 12x20: program compiled", "train unet 20x12: program compiled"})
    EXPECT_TRUE(contains(o.err, line)) << line << "\n" << o.err;
  EXPECT_EQ(values_of("whole", "loss").size(), 4u);

  ASSERT_EQ(train_in_buckets("parts", {programs, "max_train_steps=2"}).status, 0);
  o = train_in_buckets("parts", {programs});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "train unet 20x12: program loaded from the cache")) << o.err;
  EXPECT_FALSE(contains(o.err, "caching latents")) << o.err;
  EXPECT_EQ(values_of("parts", "loss"), values_of("whole", "loss"));
  for (const char* file : {"unet/diffusion_pytorch_model.safetensors", "training_state/arrays.safetensors"})
    EXPECT_EQ(read_file(t / ("parts/checkpoints/4/" + std::string(file))),
              read_file(t / ("whole/checkpoints/4/" + std::string(file))));

  // The same order, also after an interruption, if images are encoded in the step.
  for (const char* steps : {"max_train_steps=2", "max_train_steps=4"}) {
    o = train_in_buckets("in_step", {"cache_latents_text_encoder_outputs=false", steps});
    ASSERT_EQ(o.status, 0) << o.err;
  }
  expect_near(values_of("in_step", "loss"), values_of("whole", "loss"), 1e-4);

  o = train_in_buckets("not_larger",
                       {"bucket_no_upscale=true", "random_flip=true", "max_train_steps=1", "per_device_batch_size=1",
                        "resolution=32", "train_data_dir=" + (t / "small_wide")});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "bucket 20x12: 1 images")) << o.err;
}

TEST_F(BucketRuns, MasksWeighTheLossOfTrainingAndNotOfEvaluation) {
  auto run = [&](const std::string& name, std::vector<std::string> words) {
    words.insert(words.end(), {"max_train_steps=2", "train_data_dir=" + (t / "wide"), "eval_every=1",
                               "eval_data_dir=" + (t / "square"), "timesteps_list=[500]"});
    const Outcome o = train_in_buckets(name, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return values_of(name, "loss");
  };
  const auto masks = [](const char* folder) { return "conditioning_data_dir=" + (t / folder); };
  const std::vector<double> plain = run("plain", {}), ones = run("ones", {"masked_loss=true", masks("ones")}),
                            right = run("right", {"masked_loss=true", masks("right")});
  expect_near(ones, plain, 1e-6);
  ASSERT_EQ(right.size(), 2u);
  EXPECT_NEAR(right[0] / plain[0], 0.5, 0.2);  // about half of the error remains
  expect_near(run("right_in_step", {"masked_loss=true", masks("right"), "cache_latents_text_encoder_outputs=false"}),
              right, 1e-4);
  // Evaluation uses unmasked squares of the resolution in every run; by the second step masks changed the weights.
  const std::vector<double> held_out = values_of("plain", "eval_loss");
  ASSERT_EQ(held_out.size(), 2u);
  expect_near(values_of("ones", "eval_loss"), held_out, 1e-6);
  expect_near(values_of("right", "eval_loss"), held_out, 1e-2);
  expect_near(values_of("right_in_step", "eval_loss"), values_of("right", "eval_loss"), 1e-4);
}

TEST_F(BucketRuns, SizesAreConditioningIfAKeySaysSoAndAlphaIsAMask) {
  auto run = [&](const std::string& name, const std::string& images, std::vector<std::string> words) {
    words.insert(words.end(), {"center_crop=true", "max_train_steps=2", "per_device_batch_size=1",
                               "train_data_dir=" + (t / images)});
    const Outcome o = train(name, words);
    EXPECT_EQ(o.status, 0) << o.err;
    return values_of(name, "loss");
  };
  const std::vector<std::string> reported = {"original_size_conditioning=true", "alpha_mask=true"};
  EXPECT_NE(run("wide_told", "wide", reported)[0], run("wide_untold", "wide", {})[0]);
  // A square image of the resolution has the default conditioning; an image without alpha has weight 1 everywhere.
  expect_near(run("square_told", "square", reported), run("square_untold", "square", {}), 1e-6);
}

// P-9
TEST_F(BucketRuns, WhatDoesNotGoTogetherIsRefusedByName) {
  const std::string sd = "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sd";
  expect_refused({"enable_bucket=true", "bucket_reso_steps=6"}, "bucket_reso_steps is 6; expected a multiple of 4");
  expect_refused({"enable_bucket=true", "bucket_reso_steps=4"}, "min_bucket_reso 256");
  expect_refused({"enable_bucket=true", "train_new_vae=true"}, "train_new_vae cannot be combined with enable_bucket");
  expect_refused({"enable_bucket=true", "instance_data_dir=" + (t / "pictures"), "class_data_dir=" + (t / "pictures"),
                  "num_class_images=1", "instance_prompt=x", "class_prompt=x"},
                 "DreamBooth (instance_data_dir) cannot be combined with enable_bucket");
  expect_refused({"masked_loss=true", "alpha_mask=true", "replay_batches=x"},
                 "replay_batches cannot be combined with masked_loss");
  expect_refused(
      {"enable_bucket=true", "dataset_type=tfrecord"},
      "encoded records (dataset_type tfrecord or grain with cache_latents_text_encoder_outputs) cannot be combined "
      "with enable_bucket");
  const Outcome o =
      maxdiffusion({"prepare_tfrecords", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                    "tfrecords_dir=" + (t / "records"), "train_data_dir=" + (t / "pictures"), "alpha_mask=true"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "prepare_tfrecords cannot be combined with alpha_mask")) << o.err;
  expect_refused({"original_size_conditioning=true", sd},
                 "original_size_conditioning is true; expected false: this model is not conditioned on sizes");
  const std::string refiner = "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/refiner/refiner";
  for (const char* key : {"original_size_conditioning=true", "enable_bucket=true"})
    expect_refused({key, refiner}, "this model is conditioned on an aesthetic score, which samples do not have");
  expect_refused({"train_new_unet=true", "train_lora=true"}, "train_new_unet cannot be combined with train_lora");
  expect_refused({"masked_loss=true"}, "masked_loss needs alpha_mask or conditioning_data_dir");
  expect_refused({"conditioning_data_dir=" + (t / "ones")}, "conditioning_data_dir needs masked_loss");
  expect_refused({"conditioning_data_dir=" + (t / "ones"), "masked_loss=true", "alpha_mask=true"},
                 "conditioning_data_dir cannot be combined with alpha_mask");
  make_folders(t / "small");
  put("small/0", 9, 9, [](int64_t, int64_t) { return 255; });
  expect_refused({"train_data_dir=" + (t / "square"), "conditioning_data_dir=" + (t / "small"), "masked_loss=true"},
                 "square/0.png: it has 9x9 pixels; expected 16x16");
}

}  // namespace
}  // namespace md
