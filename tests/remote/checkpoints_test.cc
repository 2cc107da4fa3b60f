// Checkpoints in buckets: one that is not whole is never read, whatever is lost on the way; nothing is lost that waits;
// what is read is only what is needed.
#include <atomic>
#include <filesystem>

#include "maxdiffusion/checkpoint/bucket_checkpoints.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/test_arrays.h"
#include "maxdiffusion/storage/staging.h"
#include "maxdiffusion/storage/write.h"
#include "tests/remote/world.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Steps = std::vector<int64_t>;
using WriteFault = BucketServer::WriteFault;

/// A checkpoint whose every array holds `value`, so that a mixture of two would show.
CheckpointContent content_of(float value) {
  CheckpointContent c;
  c.weights["unet"] = {{"conv_in.weight", filled({4, 3}, value)}};
  c.weights["vae"] = {{"norm.weight", filled({8}, value)}};
  c.files["model_index.json"] = "{}";
  c.files["unet/config.json"] = "{\"value\": " + std::to_string(value) + "}";
  c.state = {{"adam_m/unet/conv_in.weight", filled({4, 3}, value)}};
  c.state_json = "{\"value\": " + std::to_string(value) + "}";
  return c;
}

/// The value of a checkpoint that is whole in every file.
float value_of(const std::string& dir, int64_t step) {
  const std::string folder = checkpoint_folder(dir, step);
  const float value = read_training_state(dir, step).state.at("adam_m/unet/conv_in.weight").whole().view<float>()[0];
  verify_checksums(local_checkpoint(folder, CheckpointPart::all));
  return value;
}

class BucketCheckpoints : public testing::TestWithParam<const char*> {
 protected:
  BucketCheckpoints() {
    server().put("runs", "", "");
    for (const std::string& key : server().keys("runs")) server().erase("runs", key);
    another_machine();
  }
  ~BucketCheckpoints() override {
    server().fail_writes(WriteFault::none, 0);
    server().on_write({});
  }
  /// From now on nothing of before is on this machine.
  void another_machine() { machine(++machines_); }
  void machine(int number) { ::setenv("XDG_CACHE_HOME", (t / std::to_string(number)).c_str(), 1); }
  void save(int64_t step, float value, int keep = 0) {
    CheckpointWriter writer(dir, keep);
    writer.save(step, [value] { return content_of(value); });
    writer.finish();
  }
  TemporaryFolder t;
  int machines_ = 0;
  const std::string dir = std::string(GetParam()) + "://runs/a/checkpoints?retry_limit_seconds=2";
};
INSTANTIATE_TEST_SUITE_P(, BucketCheckpoints, testing::Values("s3", "gs"),
                         [](const auto& i) { return std::string(i.param); });

TEST_P(BucketCheckpoints, AreReadOnAnotherMachineAsTheyWereWritten) {
  EXPECT_EQ(list_checkpoints(dir), Steps());
  save(9, 1);
  save(10, 2);
  for (bool other : {false, true}) {
    if (other) another_machine();
    EXPECT_EQ(list_checkpoints(dir), (Steps{9, 10}));
    EXPECT_EQ(value_of(dir, 9), 1);
    EXPECT_EQ(value_of(dir, 10), 2);
  }
  const std::string local = t / "local";
  write_checkpoint(local, 10, content_of(2));
  for (const auto& f : fs::recursive_directory_iterator(local))
    if (f.is_regular_file()) {
      const std::string name = f.path().lexically_relative(local).string();
      EXPECT_EQ(server().object("runs", "a/checkpoints/" + name), read_file(f.path())) << name;
    }
}

TEST_P(BucketCheckpoints, OnlyWhatIsNeededIsFetchedAndOnlyOnce) {
  save(1, 1);
  another_machine();
  const auto fetched = [&](CheckpointPart part, const std::string& component) {
    server().requests();
    local_checkpoint(checkpoint_folder(dir, 1), part, component);
    std::string names;
    for (std::string r : server().requests())
      if (r.starts_with("GET ") && r.find("safetensors") != r.npos)
        names += r.substr(r.rfind('/', r.rfind('/') - 1) + 1) + " ";
    return names;
  };
  EXPECT_EQ(fetched(CheckpointPart::component, "unet"), "unet/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(fetched(CheckpointPart::component, "unet"), "");
  EXPECT_EQ(fetched(CheckpointPart::model, ""), "vae/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(fetched(CheckpointPart::component, "training_state"), "training_state/arrays.safetensors ");
  // What has become other bytes on this machine is fetched again.
  const std::string file = staging(checkpoint_folder(dir, 1)) + "/vae/diffusion_pytorch_model.safetensors";
  std::string bytes = read_file(file);
  bytes.back() ^= 1;
  write_file_atomic(file, bytes);
  EXPECT_EQ(fetched(CheckpointPart::all, ""), "vae/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(value_of(dir, 1), 1);
}

TEST_P(BucketCheckpoints, KilledAtAnyRequestTheOneBeforeIsWholeAndTheNextRunPutsWhatWaits) {
  save(1, 1);
  int64_t writes = 0;
  server().on_write([&](const std::string&) { ++writes; });
  save(2, 2);
  server().on_write({});
  remove_below(below(dir, "2"));
  remove_below(staging(dir));
  ASSERT_GE(writes, 7);
  for (int64_t k = 0; k < writes; ++k) {
    SCOPED_TRACE(k);
    another_machine();
    const int killed = machines_;
    server().fail_writes(WriteFault::forbidden, 1 << 20, k);  // what a killed process asks for is not done either
    const Failure f = failure_of([&] { save(2, 2); });
    server().fail_writes(WriteFault::none, 0);
    expect_says(f, {"runs/a/checkpoints", "checkpoint 2 is whole in '" + (t / std::to_string(killed)), "same command"});
    EXPECT_EQ(list_checkpoints(dir), (Steps{1, 2}));  // one of them on this machine
    EXPECT_EQ(value_of(dir, 2), 2);
    another_machine();
    EXPECT_EQ(list_checkpoints(dir), Steps{1});
    EXPECT_EQ(value_of(dir, 1), 1);
    machine(killed);
    CheckpointWriter(dir, 0).finish();
    another_machine();
    EXPECT_EQ(list_checkpoints(dir), (Steps{1, 2}));
    EXPECT_EQ(value_of(dir, 2), 2);
    remove_below(below(dir, "2"));
  }
}

TEST_P(BucketCheckpoints, WhatWasPutBeforeAFailureIsNotPutAgain) {
  const auto count = [&](const std::function<void()>& act) {
    std::atomic<int64_t> writes = 0;
    server().on_write([&](const std::string&) { ++writes; });
    act();
    server().on_write({});
    return writes.load();
  };
  const int64_t all = count([&] { save(1, 1); });
  const int64_t half = all / 2;
  CheckpointWriter writer(dir, 0);
  server().fail_writes(WriteFault::forbidden, 1 << 20, half);
  writer.save(2, [] { return content_of(2); });
  EXPECT_THROW(writer.finish(), Error);
  server().fail_writes(WriteFault::none, 0);
  EXPECT_LE(count([&] { writer.finish(); }), all - half + 1);
  another_machine();
  EXPECT_EQ(value_of(dir, 2), 2);
}

TEST_P(BucketCheckpoints, WeightsThatAreThereAlreadyAreCopiedThere) {
  save(1, 1);
  server().requests();
  CheckpointWriter writer(dir, 0);
  writer.save(2, [] {
    CheckpointContent c = content_of(2);
    c.weights.at("vae") = content_of(1).weights.at("vae");
    return c;
  });
  writer.finish();
  std::string copied;
  for (const std::string& r : server().requests())
    if (r.starts_with("COPY ")) copied += r.substr(r.rfind("checkpoints/"));
  EXPECT_EQ(copied, "checkpoints/2/vae/diffusion_pytorch_model.safetensors");
  another_machine();
  EXPECT_EQ(value_of(dir, 2), 2);
}

TEST_P(BucketCheckpoints, NobodyWaitsForUploadsButFinish) {
  CheckpointWriter writer(dir, 2);
  server().fail_writes(WriteFault::busy, 1 << 20);
  for (int64_t step : {1, 2, 3, 4}) writer.save(step, [step] { return content_of(static_cast<float>(step)); });
  EXPECT_TRUE(server().keys("runs").empty());
  server().fail_writes(WriteFault::none, 0);
  writer.finish();
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), (Steps{3, 4}));
  EXPECT_EQ(value_of(dir, 3), 3);
  EXPECT_EQ(value_of(dir, 4), 4);
}

TEST_P(BucketCheckpoints, OldOnesGoWithTheirStateFirst) {
  for (int64_t step : {1, 2}) save(step, 1, 2);
  std::vector<std::string> removed, put;
  server().on_write([&](const std::string& r) {
    if (r.starts_with("PUT") && r.find("/3/") != r.npos) put.push_back(r);
    if (r.starts_with("DELETE") || (r.starts_with("POST") && r.find("upload") == r.npos)) removed.push_back(r);
  });
  save(3, 3, 2);
  server().on_write({});
  EXPECT_EQ(list_checkpoints(dir), (Steps{2, 3}));
  ASSERT_FALSE(removed.empty());
  EXPECT_TRUE(removed[0].ends_with("/1/training_state/state.json")) << removed[0];
  if (GetParam() == std::string("s3")) {
    EXPECT_TRUE(put.back().ends_with("/3/training_state/state.json")) << put.back();
  }
  for (const std::string& key : server().keys("runs")) EXPECT_EQ(key.find("checkpoints/1/w"), key.npos) << key;
}

TEST_P(BucketCheckpoints, OneOfTheSameStepIsReplaced) {
  save(1, 1);
  save(1, 2);
  EXPECT_EQ(value_of(dir, 1), 2);
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), Steps{1});
  EXPECT_EQ(value_of(dir, 1), 2);
}

TEST_P(BucketCheckpoints, ADamagedOneIsNamedAndSetAside) {
  save(1, 1);
  save(2, 2);
  const std::string key = "a/checkpoints/2/training_state/arrays.safetensors";
  std::string bytes = server().object("runs", key);
  bytes.back() ^= 1;
  server().put("runs", key, bytes);
  another_machine();
  expect_says(failure_of([&] { value_of(dir, 2); }),
              {"2/training_state/arrays.safetensors", "not those that were written"});
  EXPECT_TRUE(set_aside(dir, 2).ends_with("runs/a/checkpoints/2/training_state/state.json.damaged"));
  EXPECT_EQ(list_checkpoints(dir), Steps{1});
  EXPECT_EQ(checkpoint_folders(dir), Steps{1});
}

TEST_P(BucketCheckpoints, CountOnlyWhenWhatComesBeforeIsThere) {
  std::atomic<bool> asked = false;
  CheckpointWriter writer(dir, 0, {}, [&] {
    asked = true;
    EXPECT_EQ(server().object("runs", "a/checkpoints/1/training_state/state.json"), "");
    EXPECT_NE(server().object("runs", "a/checkpoints/1/training_state/arrays.safetensors"), "");
    fail(Code::io, "the run's folder is in use by another");
  });
  // The folder of this machine has it, which counts here only.
  writer.save(1, [] { return content_of(1); });
  EXPECT_THROW(writer.finish(), Error);
  EXPECT_TRUE(asked);
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), Steps());
}

}  // namespace
}  // namespace md
