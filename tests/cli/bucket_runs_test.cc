// Runs with outputs in a bucket: killed between two files and resumed on another machine, they are equal to the bit to
// a run on this machine. Uses the real program and the tests' bucket server.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/image.h"
#include "tests/bucket_server.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;

class RunsInBuckets : public testing::Test {
 protected:
  RunsInBuckets() {
    make_folders(t / "pictures");
    for (int i = 0; i < 4; ++i) {
      HostArray rgb(Shape{DType::u8, {16, 16, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 48) * 5);
      write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
      write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart " + std::to_string(i));
    }
    server.put("runs", "", "");
  }
  std::vector<std::string> words(const std::string& command, const std::string& output_dir,
                                 const std::vector<std::string>& extra = {}) const {
    std::vector<std::string> all = {command,
                                    MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                    "run_name=mine",
                                    "output_dir=" + output_dir,
                                    "pretrained_model_name_or_path=" MD_SOURCE_DIR "/tests/golden/pipelines/sd",
                                    "train_data_dir=" + (t / "pictures"),
                                    "resolution=16",
                                    "per_device_batch_size=2",
                                    "max_train_steps=6",
                                    "checkpoint_every=4",
                                    "checkpoints_to_keep=2",
                                    "learning_rate=1e-3",
                                    "log_period=1",
                                    "gcs_metrics=true",
                                    "diffusion_scheduler_config={_class_name: DDIMScheduler}",
                                    "jax_cache_dir=" + (t / "programs")};
    if (command == "generate") std::erase_if(all, [](auto& w) { return w.starts_with("pretrained_model"); });
    all.insert(all.end(), extra.begin(), extra.end());
    return all;
  }
  /// Environment of a simulated machine: it has its own cache folder.
  std::string environment(const std::string& machine) const {
    std::string all = "XDG_CACHE_HOME=" + (t / machine);
    for (const char* extra : {" AWS_ACCESS_KEY_ID=writer", " AWS_SECRET_ACCESS_KEY=hush", " AWS_REGION=here",
                              " AWS_EC2_METADATA_DISABLED=true", " no_proxy=127.0.0.1"})
      all += extra;
    return all + " AWS_ENDPOINT_URL=http://" + server.address() + " STORAGE_EMULATOR_HOST=http://" + server.address();
  }
  Outcome run(const std::vector<std::string>& line, const std::string& machine) const {
    Outcome o = maxdiffusion(line, environment(machine));
    EXPECT_FALSE(contains(o.err, "hush") || contains(o.err, "inaliz")) << o.err;
    return o;
  }
  /// Kills the program when it uploads the `nth` file whose name contains `part`. Returns its status as waitpid does.
  int killed(const std::vector<std::string>& line, const std::string& machine, const std::string& part, int nth) {
    std::atomic<pid_t> child = 0;
    std::atomic<int> seen = 0;
    server.on_write([&](const std::string& request) {
      if (contains(request, part) && ++seen == nth) ::kill(child, SIGKILL);
    });
    std::vector<std::string> all = {"env"};
    for (size_t at = 0, end; at < environment(machine).size(); at = end + 1) {
      end = std::min(environment(machine).find(' ', at), environment(machine).size());
      all.push_back(environment(machine).substr(at, end - at));
    }
    all.emplace_back(MD_BINARY_DIR "/maxdiffusion");
    all.insert(all.end(), line.begin(), line.end());
    std::vector<char*> argv;
    for (std::string& w : all) argv.push_back(w.data());
    argv.push_back(nullptr);
    child = ::fork();
    if (child == 0) {
      if (!::freopen((t / "killed").c_str(), "w", stderr)) ::_exit(126);
      ::execvp("env", argv.data());
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    server.on_write({});
    return status;
  }
  std::set<std::string> keys(const std::string& prefix) {
    std::set<std::string> found;
    for (const std::string& key : server.keys("runs"))
      if (key.starts_with(prefix) && !key.ends_with('/')) found.insert(key);
    return found;
  }
  void expect_equals_local(const std::string& folder, const std::string& prefix,
                           const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      for (const auto& f : fs::recursive_directory_iterator(folder + "/" + part)) {
        if (!f.is_regular_file()) continue;
        const std::string name = f.path().lexically_relative(folder).string();
        EXPECT_TRUE(server.object("runs", prefix + name) == read_file(f.path())) << name;
      }
  }
  TemporaryFolder t;
  BucketServer server;
};

// S2-6, S2-7, S3-6, S3-15, S3-27, S3-29, S4-7, S4-8, S4-72
TEST_F(RunsInBuckets, KilledBetweenTwoFilesTheyResumeOnAnotherMachineToTheBit) {
  Outcome o = run(words("train", t / "local"), "local");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const std::string scheme : {"s3", "gs"}) {
    SCOPED_TRACE(scheme);
    const std::string place = scheme + "://runs/" + scheme, prefix = scheme + "/mine/";
    const int status = killed(words("train", place, {"checkpoints_to_keep=0"}), "first", "/mine/checkpoints/4/", 3);
    ASSERT_TRUE(WIFSIGNALED(status)) << read_file(t / "killed");
    EXPECT_TRUE(keys(prefix).contains(prefix + "checkpoints/2/training_state/state.json"));
    EXPECT_FALSE(keys(prefix + "checkpoints/4/").empty());
    EXPECT_FALSE(keys(prefix).contains(prefix + "checkpoints/4/training_state/state.json"));
    EXPECT_EQ(keys(prefix + ".lock/").size(), 1u);
    o = run(words("train", place), scheme + "_second");
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(contains(o.err, "continues from " + place + "/mine/checkpoints/2")) << o.err;
    expect_equals_local(t / "local/mine", prefix, {"checkpoints/6", "checkpoints/4"});
    EXPECT_TRUE(keys(prefix + "checkpoints/2/").empty());
    EXPECT_TRUE(keys(prefix + ".lock/").empty());
    EXPECT_GE(keys(prefix + "tensorboard/events.out").size(), 2u);
    EXPECT_TRUE(contains(server.object("runs", prefix + "config.yml"), place)) << o.err;
    const std::string metrics = server.object("runs", prefix + "metrics.jsonl");
    for (int step = 1; step <= 6; ++step)
      EXPECT_TRUE(contains(metrics, "{\"step\": " + std::to_string(step) + ",")) << metrics;
    EXPECT_EQ(std::ranges::count(metrics, '\n'), 6);
    EXPECT_TRUE(keys(prefix).contains(prefix + "loss.png"));
    EXPECT_TRUE(keys(prefix).contains(prefix + "metrics/metrics_step_000006_to_step_000006.txt"));
  }
}

// S0-97, S3-29
TEST_F(RunsInBuckets, WhateverIsWrittenMayBeThereAndIsReadOnAnotherMachine) {
  const std::vector<std::string> places = {"dataset_save_location=s3://runs/data",
                                           "jax_cache_dir=gs://runs/programs",
                                           "metrics_file=gs://runs/logs/lines.jsonl",
                                           "timing_metrics_file=s3://runs/logs/times.txt",
                                           "base_output_directory=gs://runs/configs/",
                                           "save_config_to_gcs=true",
                                           "max_train_steps=2",
                                           "checkpoint_dir=s3://runs/saved",
                                           "prompt=heart",
                                           "num_inference_steps=2"};
  Outcome o = run(words("train", t / "here", places), "first");
  ASSERT_EQ(o.status, 0) << o.err;
  for (const char* key :
       {"logs/lines.jsonl", "logs/times.txt", "configs/mine/config.yml", "saved/2/training_state/state.json"})
    EXPECT_NE(server.object("runs", key), "") << key;
  EXPECT_TRUE(contains(server.object("runs", "logs/lines.jsonl"), "\"learning/loss\""));
  EXPECT_TRUE(contains(server.object("runs", "logs/times.txt"), "Finished: training"));
  for (const char* kind : {"captions-", "images-"})
    for (const char* file : {"/key.txt", "/part-"}) {
      const auto cached = keys("data/cache/");
      EXPECT_TRUE(std::any_of(cached.begin(), cached.end(),
                              [&](const std::string& key) {
                                return key.starts_with(std::string("data/cache/") + kind) && contains(key, file);
                              }))
          << kind << file;
    }
  EXPECT_FALSE(keys("programs/").empty());

  // Cached latents and compiled programs are read from the bucket.
  o = run(words("train", t / "there", places), "second");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "program loaded from the cache")) << o.err;
  EXPECT_FALSE(contains(o.err, "caching latents")) << o.err;

  // A third machine samples the trained model and converts it.
  const std::vector<std::string> sampling = {"prompt=heart", "num_inference_steps=2",
                                             "jax_cache_dir=gs://runs/programs"};
  std::vector<std::string> from_bucket = sampling, local = sampling;
  from_bucket.emplace_back("checkpoint_dir=s3://runs/saved");
  o = run(words("generate", "s3://runs/sampled", from_bucket), "third");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "the run's checkpoint s3://runs/saved/2 is used")) << o.err;
  const std::string copy = t / "copy";
  o = run({"convert", "s3://runs/saved/2", copy}, "third");
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string weights = "/unet/diffusion_pytorch_model.safetensors";
  EXPECT_EQ(read_file(copy + weights), server.object("runs", "saved/2" + weights));
  o = run({"convert", copy, "gs://runs/copy"}, "third");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(server.object("runs", "copy" + weights), read_file(copy + weights));
  local.push_back("checkpoint_dir=" + (t / "saved"));
  for (const std::string& key : server.keys("runs"))
    if (key.starts_with("saved/2/") && !key.ends_with('/')) {
      make_folders(fs::path(t / key).parent_path());
      write_file_atomic(t / key, server.object("runs", key));
    }
  o = run(words("generate", t / "sampled", local), "third");
  ASSERT_EQ(o.status, 0) << o.err;
  int64_t images = 0;
  for (const auto& f : fs::directory_iterator(t / "sampled")) {
    const std::string there = server.object("runs", "sampled/" + f.path().filename().string());
    const size_t pixels = there.find("IDAT");
    ASSERT_NE(pixels, std::string::npos) << f.path();
    EXPECT_TRUE(there.substr(pixels) == pixels_of(f.path())) << f.path();
    ++images;
  }
  EXPECT_EQ(images, std::ssize(keys("sampled/")));
  EXPECT_GT(images, 0);

  // Other runs may use a model folder or checkpoint in the bucket; the second use reads the local cache.
  for (const auto& [model, same] :
       {std::pair<std::string, std::string>{"gs://runs/copy", copy}, {"s3://runs/saved/2", t / "saved/2"}}) {
    const std::string again = t / ("again_" + model.substr(0, 2)), plain = t / ("plain_" + model.substr(0, 2));
    for (const auto& [from, to] : {std::pair{model, again}, {model, again}, {same, plain}}) {
      std::vector<std::string> from_model = sampling;
      from_model.push_back("pretrained_model_name_or_path=" + from);
      o = run(words("generate", to, from_model), "fourth");
      ASSERT_EQ(o.status, 0) << o.err;
    }
    EXPECT_TRUE(pixels_of(again + "/image_0.png") == pixels_of(plain + "/image_0.png")) << model;
  }
  for (const auto& f : fs::recursive_directory_iterator(t / "fourth/maxdiffusion/places"))
    EXPECT_NE(f.path().filename(), "arrays.safetensors") << "the training state is of no use there";
  o = run(words("train", t / "from_model", {"pretrained_model_name_or_path=gs://runs/copy", "max_train_steps=1"}),
          "fourth");
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(read_file(t / "from_model/mine/config.yml"), "gs://runs/copy"));
}

// S3-6
TEST_F(RunsInBuckets, AMissingOrRefusingBucketIsAnErrorBeforeTheRunBegins) {
  Outcome o = run(words("train", "s3://nowhere/a"), "first");
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "s3://nowhere/a") && contains(o.err, "is 'nowhere' the bucket's name?")) << o.err;
  server.lock("runs", "somebody");
  o = run(words("train", "s3://runs/a"), "first");
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "s3://runs/a/mine") && contains(o.err, "AWS_ACCESS_KEY_ID and")) << o.err;
  EXPECT_FALSE(contains(o.err, "Running training")) << o.err;
}

}  // namespace
}  // namespace md
