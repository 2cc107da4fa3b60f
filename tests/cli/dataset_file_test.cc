// Runs on data sets of several folders, described by kohya's file, and `check` of such data, through the real program.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/write_video.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;

class DatasetFileRuns : public testing::Test {
 protected:
  DatasetFileRuns() {
    for (const auto& [folder, n, width] : {std::tuple{"a", 4, 16}, {"b", 3, 48}, {"c", 2, 16}}) {
      make_folders(t / folder);
      for (int i = 0; i < n; ++i) write_image(fmt::format("{}/{}", folder, i), width, 61 * i + folder[0]);
    }
    write_file_atomic(t / "dataset.toml", toml());
  }
  void write_image(const std::string& name, int width, int seed) {
    HostArray rgb(Shape{DType::u8, {16, width, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t k = 0; k < v.size(); ++k)
      v[k] = static_cast<uint8_t>(seed * 7 + static_cast<int>(k / 3 % static_cast<size_t>(width)) * 9 +
                                  static_cast<int>(k / 48) * (seed % 5));
    write_png(t / (name + ".png"), rgb);
    write_file_atomic(t / (name + ".txt"), fmt::format("heart, red, {}, small, on white", seed));
  }
  /// 8 + 3 samples, and as many of the class: 22 per epoch, in buckets of 16×16 and 24×8.
  static std::string toml(const std::string& extra = "") {
    return R"([general]
enable_bucket = true
bucket_reso_steps = 8
min_bucket_reso = 8
max_bucket_reso = 32
shuffle_caption = true
keep_tokens = 1
caption_tag_dropout_rate = 0.2

[[datasets]]
resolution = 16
  [[datasets.subsets]]
  image_dir = "a"
  num_repeats = 2
  flip_aug = true
  caption_dropout_rate = 0.3
  [[datasets.subsets]]
  image_dir = "b"
)" + extra +
           R"(  [[datasets.subsets]]
  image_dir = "c"
  is_reg = true
)";
  }
  std::vector<std::string> words(const std::string& name, const std::vector<std::string>& extra = {}) const {
    std::vector<std::string> all = {"train",
                                    MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "run_name=" + name,
                                    "output_dir=" + (t / "runs"),
                                    "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                                    "diffusion_scheduler_config={_class_name: DDIMScheduler}",
                                    "dataset_config=" + (t / "dataset.toml"),
                                    "resolution=16",
                                    "per_device_batch_size=2",
                                    "max_train_steps=7",
                                    "learning_rate=1e-3",
                                    "lr_scheduler=constant",
                                    "log_period=1",
                                    "activations_dtype=float32",
                                    "prior_loss_weight=0.5"};
    all.insert(all.end(), extra.begin(), extra.end());
    return all;
  }
  Outcome train(const std::string& name, const std::vector<std::string>& extra = {}) const {
    Outcome o = maxdiffusion(words(name, extra));
    EXPECT_EQ(o.status, 0) << o.err;
    return o;
  }
  std::vector<double> losses(const std::string& name) const {
    std::vector<double> out;
    std::istringstream lines(read_file(t / ("runs/" + name + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);)
      if (const auto values = parse_json(line); values.contains("loss")) out.push_back(values.at("loss"));
    return out;
  }
  std::string state(const std::string& name) const {
    return read_file(t / ("runs/" + name + "/checkpoints/7/training_state/arrays.safetensors"));
  }
  TemporaryFolder t;
};

TEST_F(DatasetFileRuns, ResumeInTheMiddleOfAnEpochToTheBitAndAreThoseOfAMesh) {
  const Outcome whole = train("whole");
  for (const char* line : {"captions vary: they are encoded in every step, images once", "': 4 images × 2 repeats",
                           "2 images × 1 repeat, regularization", "bucket 24x8: 3 images"})
    EXPECT_TRUE(contains(whole.err, line)) << line << "\n" << whole.err;
  train("parted", {"max_train_steps=3"});
  const Outcome rest = train("parted");
  EXPECT_TRUE(contains(rest.err, "continues from")) << rest.err;
  EXPECT_TRUE(state("whole") == state("parted"));
  EXPECT_EQ(losses("whole"), losses("parted"));
  // The same samples if images are encoded in the step.
  train("in_steps", {"cache_latents_text_encoder_outputs=false"});
  // Eight devices split the batches of one.
  train("one", {"per_device_batch_size=8", "max_train_steps=3"});
  train("eight", {"cpu_device_count=8", "per_device_batch_size=1", "max_train_steps=3"});
  const std::vector<double> one = losses("one"), eight = losses("eight"), all = losses("whole"),
                            in_steps = losses("in_steps");
  ASSERT_EQ(one.size(), 3u);
  ASSERT_EQ(eight.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(eight[i], one[i], 1e-4 * one[i]) << i;
  ASSERT_EQ(in_steps.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_NEAR(in_steps[i], all[i], 1e-3 * all[i]) << i;
}

TEST_F(DatasetFileRuns, WeighTheClass) {
  train("half"), train("none", {"prior_loss_weight=0"});
  double half = 0, none = 0;
  for (double loss : losses("half")) half += loss;
  for (double loss : losses("none")) none += loss;
  EXPECT_LT(none, 0.85 * half);  // half of the samples had weight one half
  EXPECT_GT(none, 0.4 * half);
}

TEST_F(DatasetFileRuns, NameWhatIsWrongByItsLine) {
  write_file_atomic(t / "dataset.toml", toml("  num_repeats = 0\n"));
  Outcome o = maxdiffusion(words("wrong"));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "dataset.toml:19: num_repeats is 0; expected a whole number, 1 or more")) << o.err;
  write_file_atomic(t / "dataset.toml", toml("  conditioning_data_dir = \"masks\"\n"));
  make_folders(t / "masks");
  for (int i = 0; i < 3; ++i) write_image(fmt::format("masks/{}", i), i == 1 ? 40 : 48, 200);
  o = maxdiffusion(words("wrong", {"max_train_steps=22"}));  // which reads all images
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "b/1.png: it has 40x16 pixels; expected 48x16, the image's size")) << o.err;
  o = maxdiffusion(words("wrong", {"max_train_samples=3"}));
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "dataset_config cannot be combined with max_train_samples")) << o.err;
}

TEST_F(DatasetFileRuns, MaskTheLossByAFolder) {
  make_folders(t / "masks");
  for (int i = 0; i < 3; ++i) {
    HostArray black(Shape{DType::u8, {16, 48, 3}});
    std::ranges::fill(black.mutable_view<uint8_t>(), 0);
    write_png(t / fmt::format("masks/{}.png", i), black);
  }
  train("all", {"prior_loss_weight=1"});
  write_file_atomic(t / "dataset.toml", toml("  conditioning_data_dir = \"masks\"\n"));
  train("masked", {"prior_loss_weight=1"});
  const std::vector<double> all = losses("all"), masked = losses("masked");
  int zeros = 0;
  for (size_t i = 0; i < all.size(); ++i) zeros += masked[i] == 0;
  EXPECT_GE(zeros, 1);  // batches of bucket 24x8, whose masks are all black
  EXPECT_LE(zeros, 2);
}

TEST_F(DatasetFileRuns, CheckedDataSaysWhatIsWrongAndShowsIt) {
  fs::copy_file(t / "a/1.png", t / "a/again.png");
  write_file_atomic(t / "a/again.txt", "");
  write_file_atomic(t / "b/damaged.png", read_file(t / "b/0.png").substr(0, 90));
  write_file_atomic(t / "b/damaged.txt", "it");
  write_file_atomic(t / "dataset.toml", toml());
  const Outcome o = maxdiffusion({"check", t / "dataset.toml", "check_dir=" + (t / "look")});
  EXPECT_EQ(o.status, 0) << o.err;
  for (const char* line : {"a/1.png and ", "a/again.png", "b/damaged.png: ", "images without caption: 1",
                           "images that look the same: 1", "size 16x16: ", "size 24x8: "})
    EXPECT_TRUE(contains(o.err, line)) << line << "\n" << o.err;
  for (const char* name : {"look/buckets.png", "look/contact_sheet.png"}) {
    const HostArray rgb = decode_image(t / name);
    EXPECT_GT(rgb.dims()[0] * rgb.dims()[1], 10000) << name;
  }
  const Outcome folder = maxdiffusion({"check", t / "a"});
  EXPECT_EQ(folder.status, 0) << folder.err;
  EXPECT_TRUE(contains(folder.err, "try: check_dir=FOLDER")) << folder.err;
}

TEST_F(DatasetFileRuns, CheckedClipsAreReadAsClips) {
  make_folders(t / "clips");
  HostArray frames(Shape{DType::u8, {5, 32, 32, 3}});
  auto v = frames.mutable_view<uint8_t>();
  for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(k / 96 * 3);
  for (const char* name : {"0", "1"}) {
    write_mp4(t / fmt::format("clips/{}.mp4", name), frames, {.fps = 16});
    write_file_atomic(t / fmt::format("clips/{}.txt", name), "a clip");
  }
  Outcome o = maxdiffusion({"check", t / "clips", "resolution=32"});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "2 images found, 0 damaged")) << o.err;
  write_file_atomic(t / "clips/1.mp4", "no video");
  o = maxdiffusion({"check", t / "clips", "resolution=32"});
  EXPECT_TRUE(contains(o.err, "2 images found, 1 damaged")) << o.err;
}

}  // namespace
}  // namespace md
