// Checkpoints in buckets: an incomplete one is never read, whichever request fails; pending uploads are not lost; only
// the needed parts are read.
#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <latch>
#include <set>
#include <thread>

#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/checkpoint/test_arrays.h"
#include "maxdiffusion/checkpoint/test_processes.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/write.h"
#include "tests/remote/world.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Steps = std::vector<int64_t>;
using WriteFault = BucketServer::WriteFault;

/// A checkpoint whose arrays all hold `value`, so that a mix of two checkpoints would show.
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

/// The value of a checkpoint; expects that every file is complete.
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
  /// Simulates another machine, whose cache is empty.
  void another_machine() { machine(++machines_); }
  void machine(int number) { ::setenv("XDG_CACHE_HOME", (t / std::to_string(number)).c_str(), 1); }
  void save(int64_t step, float value, int keep = 0) {
    CheckpointWriter writer(dir, keep);
    writer.save(step, [value] { return content_of(value); });
    writer.finish();
  }
  /// Number of write requests that `act` sends.
  int64_t writes_of(const std::function<void()>& act) {
    std::atomic<int64_t> writes = 0;
    server().on_write([&](const std::string&) { ++writes; });
    act();
    server().on_write({});
    return writes.load();
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
    for (const std::string& r : server().requests())
      if (r.starts_with("GET ") && r.find("safetensors") != r.npos)
        names += r.substr(r.rfind('/', r.rfind('/') - 1) + 1) + " ";
    return names;
  };
  EXPECT_EQ(fetched(CheckpointPart::component, "unet"), "unet/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(fetched(CheckpointPart::component, "unet"), "");
  EXPECT_EQ(fetched(CheckpointPart::model, ""), "vae/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(fetched(CheckpointPart::component, "training_state"), "training_state/arrays.safetensors ");
  // A cached file whose bytes changed on this machine is fetched again.
  const std::string file = local_cache_path(checkpoint_folder(dir, 1)) + "/vae/diffusion_pytorch_model.safetensors";
  std::string bytes = read_file(file);
  bytes.back() ^= 1;
  write_file_atomic(file, bytes);
  EXPECT_EQ(fetched(CheckpointPart::all, ""), "vae/diffusion_pytorch_model.safetensors ");
  EXPECT_EQ(value_of(dir, 1), 1);
}

// S3-29
TEST_P(BucketCheckpoints, KillAtAnyRequestKeepsTheLastOneAndTheNextRunUploads) {
  save(1, 1);
  const int64_t writes = writes_of([&] { save(2, 2); });
  remove_folder(below(dir, "2"));
  remove_folder(local_cache_path(dir));
  ASSERT_GE(writes, 7);
  for (int64_t k = 0; k < writes; ++k) {
    SCOPED_TRACE(k);
    another_machine();
    const int killed = machines_;
    server().fail_writes(WriteFault::forbidden, 1 << 20, k);  // a killed process sends no more requests
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
    remove_folder(below(dir, "2"));
  }
}

TEST_P(BucketCheckpoints, WhatWasPutBeforeAFailureIsNotPutAgain) {
  const int64_t all = writes_of([&] { save(1, 1); });
  const int64_t half = all / 2;
  CheckpointWriter writer(dir, 0);
  server().fail_writes(WriteFault::forbidden, 1 << 20, half);
  writer.save(2, [] { return content_of(2); });
  EXPECT_THROW(writer.finish(), Error);
  server().fail_writes(WriteFault::none, 0);
  EXPECT_LE(writes_of([&] { writer.finish(); }), all - half + 1);
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

TEST_P(BucketCheckpoints, OnlyFinishWaitsForUploads) {
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
              {"2/training_state/arrays.safetensors", "bytes differ from those written"});
  EXPECT_TRUE(quarantine(dir, 2).ends_with("runs/a/checkpoints/2/training_state/state.json.damaged"));
  EXPECT_EQ(list_checkpoints(dir), Steps{1});
  EXPECT_EQ(checkpoint_folders(dir), Steps{1});
}

TEST_P(BucketCheckpoints, CountOnlyWhenWhatComesBeforeIsThere) {
  std::atomic<bool> requested = false;
  CheckpointWriter writer(dir, 0, {}, [&] {
    requested = true;
    EXPECT_EQ(server().object("runs", "a/checkpoints/1/training_state/state.json"), "");
    EXPECT_NE(server().object("runs", "a/checkpoints/1/training_state/arrays.safetensors"), "");
    fail(Code::io, "the run's folder is in use by another");
  });
  // The checkpoint is complete in this machine's folder, which counts only on this machine.
  writer.save(1, [] { return content_of(1); });
  EXPECT_THROW(writer.finish(), Error);
  EXPECT_TRUE(requested);
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), Steps());
}

/// The part of process `p` of `n` in content_of: rows of arrays, whole tensors, and for process 0 everything else.
CheckpointContent part_of_content(int64_t p, int64_t n, float value) {
  CheckpointContent c;
  c.state["adam_m/unet/conv_in.weight"] = {{DType::f32, {8, 3}},
                                           {{Slice{{p * 8 / n, 0}, {8 / n, 3}}, filled({8 / n, 3}, value)}}};
  c.state["step"] = p == 0 ? ShardedArray(filled({}, value)) : ShardedArray({DType::f32, {}}, {});
  c.weights["unet"]["conv_in.weight"] = c.state.begin()->second;
  c.weights["text_encoder"][fmt::format("layers.{}.weight", p)] = filled({4}, value);
  if (p == 0) {
    c.weights["vae"]["norm.weight"] = filled({8}, value);
    c.files["model_index.json"] = "{}";
    c.state_json = "{\"value\": " + std::to_string(value) + "}";
  }
  return c;
}
const std::vector<std::string> kNoErrors(4);

/// Four processes that share only the bucket; their cache folders are on one machine.
class ShardsInBuckets : public BucketCheckpoints {
 protected:
  std::vector<std::string> save_by_four(int64_t step, float value, int keep = 0) const {
    return as_processes(4, [&](const CheckpointProcesses& of) {
      CheckpointWriter writer(dir, keep, of);
      writer.save(step, [&] { return part_of_content(of.process, 4, value); });
      writer.finish();
    });
  }
  /// Starts the next run of four processes.
  std::vector<std::string> begin_again() const {
    return as_processes(4, [&](const CheckpointProcesses& of) {
      flush_pending_uploads(dir, of, {});
      CheckpointWriter(dir, 0, of).finish();
    });
  }
  /// The value of a checkpoint read by any number of processes; expects that every file is complete.
  float value_of_shards(int64_t step) const {
    CheckpointReader reader(checkpoint_folder(dir, step), FromBucket::ranges);
    reader.add_component("text_encoder");
    reader.add_component("vae");
    std::set<float> values;
    for (const auto& [name, a] : reader.arrays()) {
      const HostArray whole = reader.read(name).whole();
      values.insert(whole.view<float>().begin(), whole.view<float>().end());
    }
    EXPECT_EQ(reader.arrays().size(), 3 + 4 + 1u);
    EXPECT_EQ(values.size(), 1u) << "a mixture";
    EXPECT_EQ(reader.state_json(), part_of_content(0, 4, *values.begin()).state_json);
    verify_checksums(checkpoint_folder(dir, step));
    return *values.begin();
  }
  std::set<std::string> parts_here() const {
    std::set<std::string> found;
    for (const auto& f : fs::recursive_directory_iterator(local_cache_path(dir)))
      if (f.path().string().find(".process-") != std::string::npos && f.is_regular_file()) found.insert(f.path());
    return found;
  }
};
INSTANTIATE_TEST_SUITE_P(, ShardsInBuckets, testing::Values("s3", "gs"),
                         [](const auto& i) { return std::string(i.param); });

// S3-6
TEST_P(ShardsInBuckets, AreThoseOfASharedFolderByteForByte) {
  ASSERT_EQ(save_by_four(9, 1), kNoErrors);
  const std::string local = t / "local";
  ASSERT_EQ(
      as_processes(
          4, [&](const CheckpointProcesses& of) { write_checkpoint(local, 9, part_of_content(of.process, 4, 1), of); }),
      kNoErrors);
  std::set<std::string> expected, found;
  for (const std::string& name : files_under(local)) {
    expected.insert("a/checkpoints/" + name);
    EXPECT_EQ(server().object("runs", "a/checkpoints/" + name), read_file(local + "/" + name)) << name;
  }
  for (const std::string& key : server().keys("runs"))
    if (!key.ends_with('/')) found.insert(key);
  EXPECT_EQ(found, expected);
  EXPECT_TRUE(found.contains("a/checkpoints/9/training_state/pieces-00003-of-00004.safetensors"));
  EXPECT_TRUE(found.contains("a/checkpoints/9/text_encoder/model-00004-of-00004.safetensors"));
  EXPECT_EQ(parts_here(), std::set<std::string>()) << "what is there is of no use here";
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), Steps{9});
  EXPECT_EQ(value_of_shards(9), 1);
  // A single process can read them too.
  EXPECT_EQ(read_training_state(dir, 9).state.at("adam_m/unet/conv_in.weight").whole().view<float>()[23], 1);
}

// S3-29
TEST_P(ShardsInBuckets, KillAtAnyRequestKeepsTheLastOneAndUploadsAllOrNone) {
  ASSERT_EQ(save_by_four(1, 1), kNoErrors);
  const int64_t writes = writes_of([&] { ASSERT_EQ(save_by_four(2, 2), kNoErrors); });
  remove_folder(below(dir, "2"));
  ASSERT_GE(writes, 12);
  for (int64_t k = 0; k < writes; ++k) {
    SCOPED_TRACE(k);
    another_machine();
    const int killed = machines_;
    server().fail_writes(WriteFault::forbidden, 1 << 20, k);  // a killed process sends no more requests
    for (const std::string& e : save_by_four(2, 2)) {
      EXPECT_NE(e.find("each process has its part"), e.npos) << e;
      EXPECT_NE(e.find("with as many processes on the same machines"), e.npos) << e;
    }
    server().fail_writes(WriteFault::none, 0);
    // No single process, on this or another machine, takes a part for the whole.
    EXPECT_EQ(list_checkpoints(dir), Steps{1});
    another_machine();
    EXPECT_EQ(list_checkpoints(dir), Steps{1});
    EXPECT_EQ(value_of_shards(1), 1);
    machine(killed);
    EXPECT_EQ(parts_here().size(), 3u * 3u);  // shards, weights and their descriptions
    const bool lost = k % 3 == 0;
    if (lost) remove_folder(local_cache_path(dir) + "/.process-00002-of-00004");
    ASSERT_EQ(begin_again(), kNoErrors);
    EXPECT_EQ(parts_here(), std::set<std::string>());
    another_machine();
    EXPECT_EQ(list_checkpoints(dir), (lost ? Steps{1} : Steps{1, 2}));
    EXPECT_EQ(value_of_shards(lost ? 1 : 2), lost ? 1 : 2);
    for (const std::string& key : server().keys("runs"))
      EXPECT_FALSE(lost && !key.ends_with('/') && key.find("checkpoints/2/") != key.npos) << key;
    remove_folder(below(dir, "2"));
  }
}

TEST_P(ShardsInBuckets, ThatWaitAreOfNoUseToAnotherNumberOfProcesses) {
  ASSERT_EQ(save_by_four(1, 1), kNoErrors);
  for (int64_t n : {1, 2}) {
    another_machine();
    server().fail_writes(WriteFault::forbidden, 1 << 20, 3);
    EXPECT_NE(save_by_four(2, 2), kNoErrors);
    server().fail_writes(WriteFault::none, 0);
    EXPECT_EQ(as_processes(n,
                           [&](const CheckpointProcesses& of) {
                             if (n > 1) flush_pending_uploads(dir, of, {});
                             CheckpointWriter(dir, 0, n > 1 ? of : CheckpointProcesses()).finish();
                           }),
              std::vector<std::string>(static_cast<size_t>(n)));
    EXPECT_EQ(parts_here(), std::set<std::string>());
    EXPECT_EQ(list_checkpoints(dir), Steps{1});
    for (const std::string& key : server().keys("runs"))
      EXPECT_FALSE(!key.ends_with('/') && key.find("checkpoints/2/") != key.npos) << key;
  }
}

TEST_P(ShardsInBuckets, OnlyFinishWaitsForUploadsAndOldOnesAreRemoved) {
  server().fail_writes(WriteFault::busy, 1 << 20);
  std::atomic<int> saved = 0;
  EXPECT_EQ(as_processes(4,
                         [&](const CheckpointProcesses& of) {
                           CheckpointWriter writer(dir, 2, of);
                           for (int64_t step : {1, 2, 3, 4})
                             writer.save(step, [&of, step] {
                               return part_of_content(of.process, 4, static_cast<float>(step));
                             });
                           if (++saved == 4) {
                             EXPECT_TRUE(server().keys("runs").empty());
                             server().fail_writes(WriteFault::none, 0);
                           }
                           writer.finish();
                         }),
            kNoErrors);
  EXPECT_EQ(parts_here(), std::set<std::string>());
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), (Steps{3, 4}));
  EXPECT_EQ(value_of_shards(3), 3);
  EXPECT_EQ(value_of_shards(4), 4);
}

TEST_P(ShardsInBuckets, OfTheSameStepReplaceEachOther) {
  EXPECT_EQ(as_processes(4,
                         [&](const CheckpointProcesses& of) {
                           CheckpointWriter writer(dir, 0, of);
                           for (int value = 1; value <= 6; ++value)
                             writer.save(
                                 1, [&of, value] { return part_of_content(of.process, 4, static_cast<float>(value)); });
                           writer.finish();
                         }),
            kNoErrors);
  another_machine();
  EXPECT_EQ(list_checkpoints(dir), Steps{1});
  EXPECT_EQ(value_of_shards(1), 6);
}

TEST_P(ShardsInBuckets, AreUploadedInTheBackgroundAndValidWhenComplete) {
  std::atomic<bool> counts = false;
  std::latch there(4);
  EXPECT_EQ(
      as_processes(
          4,
          [&](const CheckpointProcesses& of) {
            CheckpointWriter writer(dir, 0, of, [&] {
              counts = true;
              for (int p : {0, 1, 2, 3})
                EXPECT_NE(server().object("runs", fmt::format("a/checkpoints/7/training_state/pieces-0000"
                                                              "{}-of-00004.safetensors",
                                                              p)),
                          "");
              EXPECT_EQ(server().object("runs", "a/checkpoints/7/training_state/checksums.json").empty(), false);
              EXPECT_EQ(server().object("runs", "a/checkpoints/7/training_state/state.json"), "");
            });
            writer.save(7, [&] { return part_of_content(of.process, 4, 1); });
            // finish() may only be called after this.
            while (of.is_coordinator() && server().object("runs", "a/checkpoints/7/training_state/state.json").empty())
              std::this_thread::sleep_for(std::chrono::milliseconds(5));
            there.arrive_and_wait();
            writer.finish();
          }),
      kNoErrors);
  EXPECT_TRUE(counts);
  EXPECT_EQ(value_of_shards(7), 1);
}

TEST_P(ShardsInBuckets, AreReadByTheNeededChunks) {
  constexpr int64_t kRow = 655'360;  // 2.5 MiB
  HostArray values(Shape{DType::f32, {4, kRow}});
  float next = 0;
  for (float& v : values.mutable_view<float>()) v = next++;
  const auto row = [&](int64_t p) { return Slice{{p, 0}, {1, kRow}}; };
  ASSERT_EQ(
      as_processes(4,
                   [&](const CheckpointProcesses& of) {
                     CheckpointContent c;
                     c.state["a"] = {values.shape(), {{row(of.process), ShardedArray(values).read(row(of.process))}}};
                     c.state_json = "{}";
                     CheckpointWriter writer(dir, 0, of);
                     writer.save(1, [&] { return c; });
                     writer.finish();
                   }),
      kNoErrors);
  another_machine();
  constexpr uint64_t kChunk = kChunkBytes;
  const auto file = [](int p) {
    return fmt::format("a/checkpoints/1/training_state/pieces-0000{}-of-00004.safetensors", p);
  };
  const uint64_t size = server().object("runs", file(1)).size();
  ASSERT_GT(size, 5 * kChunk / 2);
  ASSERT_LT(size, 3 * kChunk);
  const auto same = [&](CheckpointReader& reader, const Slice& slice) {
    const HostArray found = reader.read("a", {slice}).shards[0].values,
                    expected_value = ShardedArray(values).read(slice);
    return found.shape() == expected_value.shape() &&
           std::memcmp(found.data(), expected_value.data(), expected_value.bytes()) == 0;
  };
  server().bytes_sent("");
  CheckpointReader reader(checkpoint_folder(dir, 1), FromBucket::ranges);
  EXPECT_EQ(reader.bytes_read(), 0u);  // the index holds the shapes
  uint64_t sent = static_cast<uint64_t>(server().bytes_sent("safetensors")), expected = 0;
  const auto expect_read = [&](const Slice& slice, uint64_t extra) {
    EXPECT_TRUE(same(reader, slice)) << to_string(slice);
    sent += static_cast<uint64_t>(server().bytes_sent("safetensors"));
    expected += extra;
    EXPECT_EQ(sent, expected) << to_string(slice);
    EXPECT_EQ(reader.bytes_read(), expected) << to_string(slice);
  };
  expect_read({{1, 0}, {1, 1000}}, kChunk);          // contains the header
  expect_read({{1, 300'000}, {1, 10'000}}, kChunk);  // the second chunk
  expect_read({{1, 1 << 18}, {1, 10}}, 0);           // in the first two, already read
  expect_read(row(1), size - 2 * kChunk);            // the other chunks
  expect_read({{2, 0}, {2, 7}}, 2 * kChunk);         // columns of two files
  expect_read(row(2), size - kChunk);
  server().requests();
  CheckpointReader other(checkpoint_folder(dir, 1), FromBucket::ranges);
  other.fetch({{"a", {row(0), row(3)}}});
  EXPECT_EQ(server().bytes_sent("safetensors"), static_cast<int64_t>(2 * size));
  int64_t gets = 0;
  for (const std::string& r : server().requests())
    gets += r.starts_with("GET ") && r.find("safetensors") != r.npos && r.find("/v1/b") == r.npos;
  if (GetParam() == std::string("s3")) {
    EXPECT_EQ(gets, 4);  // the header's chunk, then all others at once
  }
  EXPECT_TRUE(same(other, row(0)) && same(other, row(3)));
  EXPECT_EQ(server().bytes_sent("safetensors"), 0);
  EXPECT_FALSE(exists(local_cache_path(dir) + "/1")) << "nothing is kept on this machine";

  // A flipped bit is reported by each reader of its chunk, and by no other.
  std::string bytes = server().object("runs", file(1));
  bytes[kChunk + 5] ^= 2;
  server().put("runs", file(1), bytes);
  CheckpointReader damaged(checkpoint_folder(dir, 1), FromBucket::ranges);
  EXPECT_TRUE(same(damaged, {{1, 0}, {1, 1000}}));
  expect_says(failure_of([&] { damaged.read("a", {row(1)}); }),
              {dir.substr(0, 2) + "://runs/" + file(1), "its bytes differ from those written", "1048576 to 2097152"});
  bytes.pop_back();
  server().put("runs", file(1), bytes);
  expect_says(failure_of([&] { CheckpointReader(checkpoint_folder(dir, 1), FromBucket::ranges); }),
              {file(1), fmt::format("it has {} bytes; {} were written", size - 1, size)});
  server().erase("runs", file(1));
  expect_says(failure_of([&] { CheckpointReader(checkpoint_folder(dir, 1), FromBucket::ranges); }),
              {file(1), "there is no such file"});
}

}  // namespace
}  // namespace md
