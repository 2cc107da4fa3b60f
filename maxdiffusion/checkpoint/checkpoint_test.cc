#include "maxdiffusion/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/test_arrays.h"

namespace md {
namespace {

namespace fs = std::filesystem;

/// A checkpoint whose arrays all hold `value`, so that a mix of two checkpoints would show.
CheckpointContent content_of(float value) {
  CheckpointContent c;
  c.weights["unet"] = {{"conv_in.weight", filled({4, 3}, value)}, {"conv_in.bias", filled({4}, value)}};
  c.weights["text_encoder"] = {{"final_layer_norm.weight", filled({8}, value)}};
  c.files["model_index.json"] = "{}";
  c.files["unet/config.json"] = "{\"value\": " + std::to_string(value) + "}";
  c.state = {{"adam_m/unet/conv_in.weight", filled({4, 3}, value)}};
  c.state_json = "{\"value\": " + std::to_string(value) + "}";
  return c;
}

void expect_whole(const std::string& dir, int64_t step, float value) {
  const std::string folder = checkpoint_folder(dir, step);
  auto state = read_training_state(dir, step);
  EXPECT_EQ(state.state_json, content_of(value).state_json);
  EXPECT_EQ(state.state.at("adam_m/unet/conv_in.weight").whole().view<float>()[11], value);
  auto unet = SafetensorsReader::open(folder + "/unet").tensors();
  EXPECT_EQ(unet.at("conv_in.weight").view<float>()[11], value);
  EXPECT_EQ(unet.at("conv_in.bias").view<float>()[0], value);
  EXPECT_EQ(SafetensorsReader::open(folder + "/text_encoder/model.safetensors").tensors().size(), 1u);
  EXPECT_EQ(read_file(folder + "/unet/config.json"), content_of(value).files.at("unet/config.json"));
}

std::set<std::string> names_in(const std::string& dir) {
  std::set<std::string> out;
  for (const auto& f : fs::directory_iterator(dir)) out.insert(f.path().filename());
  return out;
}

TEST(Checkpoint, ComesBackWhole) {
  TemporaryFolder t;
  CheckpointWriter w(t / "checkpoints", 0);
  w.save(10, [] { return content_of(1); });
  w.save(200, [] { return content_of(2); });
  w.finish();
  EXPECT_EQ(list_checkpoints(t / "checkpoints"), (std::vector<int64_t>{10, 200}));
  expect_whole(t / "checkpoints", 10, 1);
  expect_whole(t / "checkpoints", 200, 2);
  EXPECT_EQ(names_in(t / "checkpoints"), (std::set<std::string>{"10", "200"}));
}

TEST(Checkpoint, OnlyWholeNumberedFoldersAreListed) {
  TemporaryFolder t;
  EXPECT_TRUE(list_checkpoints(t / "absent").empty());
  write_checkpoint(t.path(), 3, content_of(1));
  for (const char* name : {"4", "abc", "-1", "007", "3.bak", ".tmp-9-1"}) fs::create_directories(t / name);
  for (const char* name : {"5", ".tmp-9-1"}) {
    fs::create_directories(t / name + "/training_state");
    std::ofstream(t / name + "/training_state/state.json") << "{\"ste";
  }
  EXPECT_EQ(list_checkpoints(t.path()), (std::vector<int64_t>{3}));
}

TEST(Checkpoint, TheSameStepTwiceIsReplaced) {
  TemporaryFolder t;
  write_checkpoint(t.path(), 7, content_of(1));
  write_checkpoint(t.path(), 7, content_of(2));
  expect_whole(t.path(), 7, 2);
  EXPECT_EQ(names_in(t.path()), (std::set<std::string>{"7"}));
}

TEST(CheckpointWriter, KeepsTheNewest) {
  TemporaryFolder t;
  CheckpointWriter w(t.path(), 2);
  for (int64_t step : {1, 2, 3, 4}) w.save(step, [step] { return content_of(static_cast<float>(step)); });
  w.finish();
  EXPECT_EQ(names_in(t.path()), (std::set<std::string>{"3", "4"}));
  // A run that restarts from an older step must keep what it has just written.
  w.save(1, [] { return content_of(1); });
  w.finish();
  EXPECT_EQ(list_checkpoints(t.path()), (std::vector<int64_t>{1, 4}));
}

TEST(CheckpointWriter, HandsOverTheErrorOfItsThread) {
  TemporaryFolder t;
  CheckpointWriter w(t.path(), 0);
  w.save(1, []() -> CheckpointContent { fail(Code::device, "fetch failed"); });
  EXPECT_THROW(w.finish(), Error);
  w.save(2, []() -> CheckpointContent { fail(Code::device, "fetch failed"); });
  EXPECT_THROW(w.save(3, [] { return content_of(3); }), Error);
  w.save(4, [] { return content_of(4); });
  w.finish();
  EXPECT_EQ(names_in(t.path()), (std::set<std::string>{"4"}));
}

TEST(CheckpointWriter, CleansWhatAKilledRunLeft) {
  TemporaryFolder t;
  write_checkpoint(t.path(), 5, content_of(5));
  write_checkpoint(t.path(), 6, content_of(6));
  fs::create_directories(t / ".tmp-8-1/unet");
  fs::copy(t / "5", t / ".old-5-1", fs::copy_options::recursive);  // its replacement was complete
  fs::rename(t / "6", t / ".old-6-1");                             // its replacement was not
  CheckpointWriter w(t.path(), 0);
  EXPECT_EQ(names_in(t.path()), (std::set<std::string>{"5", "6"}));
  expect_whole(t.path(), 6, 6);
}

TEST(Checkpoint, RefusesPathsOutsideItsFolder) {
  TemporaryFolder t;
  auto c = content_of(1);
  c.files["../escape"] = "";
  EXPECT_THROW(write_checkpoint(t / "c", 1, c), Error);
  EXPECT_FALSE(exists(t / "escape"));
}

// Disk faults. The hook counts every write, fsync and rename.

/// The folder in memory if there is one: these tests call fsync thousands of times.
std::string fast_parent() { return exists("/dev/shm") ? "/dev/shm" : ""; }

std::atomic<int> calls_left = 0;
void full_disk(const std::string& path, size_t) {
  if (calls_left-- == 0) fail(Code::io, "write '{}': No space left on device", path);
}

// P-7
TEST(CheckpointFaults, AFullDiskAtAnyMomentLosesNothing) {
  for (int64_t step : {2, 1}) {  // a new step, and an existing one
    int failures = 0;
    for (int k = 0;; ++k) {
      TemporaryFolder t(fast_parent());
      write_checkpoint(t.path(), 1, content_of(1));
      CheckpointWriter w(t.path(), 1);
      calls_left = k;
      set_write_hook(full_disk);
      w.save(step, [] { return content_of(2); });
      std::string error;
      try {
        w.finish();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::io);
        error = e.what();
      }
      set_write_hook(nullptr);
      const auto steps = list_checkpoints(t.path());
      for (const auto& n : names_in(t.path())) EXPECT_NE(n[0], '.') << n << " stayed, k = " << k;
      if (error.empty() && calls_left >= 0) break;
      ++failures;
      if (!error.empty()) {
        EXPECT_NE(error.find(t.path()), std::string::npos) << error;
        EXPECT_NE(error.find("while saving checkpoint"), std::string::npos) << error;
      }
      ASSERT_FALSE(steps.empty()) << k;
      // Every listed checkpoint is entirely old or entirely new.
      for (int64_t s : steps)
        expect_whole(t.path(), s,
                     s == 2 || read_training_state(t.path(), s).state_json == content_of(2).state_json ? 2 : 1);
      ASSERT_LT(k, 1000);
    }
    EXPECT_GT(failures, 20) << "the hook saw too little";
  }
}

}  // namespace
}  // namespace md
