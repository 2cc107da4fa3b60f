// A state that several processes wrote in shards, resumed on other meshes and with other numbers of processes. The
// processes are simulated one after the other, each with its devices of one client.
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>

#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/test_processes.h"
#include "tests/resume/training.h"

namespace md {
namespace {

/// No device initializes moments at random, so every restored value comes from the checkpoint.
std::function<NamedShards()> nothing(const ParamTable& params) {
  EXPECT_TRUE(params.params().empty()) << "everything is trained";
  return [] { return NamedShards(); };
}

MeshConfig fsdp(int64_t n) { return {.ici_data_parallelism = 1, .ici_fsdp_parallelism = n}; }

/// A run's step, traced for other devices.
struct Traced {
  Devices devices;
  StepPrograms programs;
  const StepOptions& step;

  Traced(const TinyRun& run, const MeshConfig& mesh, int64_t n)
      : devices(Devices::open("cpu", n, mesh)),
        programs(devices, {&run.task}, run.options.step, "test"),
        step(run.options.step) {}

  /// The devices as process `p` has them if every device belongs to its own process.
  Devices as_process(int64_t p) const {
    std::vector<int> processes(static_cast<size_t>(devices.mesh().devices()));
    std::iota(processes.begin(), processes.end(), 0);
    return devices.as_process(static_cast<int>(p), processes);
  }

  /// The state in the newest checkpoint as process `p` reads it.
  HostState restored(const Devices& mine, const std::string& dir) const {
    return open_state(mine, programs, step, {.checkpoint_dir = dir, .seed = 0}, nothing)();
  }

  /// The values that a process saves, out of those it read.
  NamedShards owned(const Devices& mine, const NamedShards& values) const {
    NamedShards out;
    for (const std::string& name : programs.state_names()) {
      const ShardedArray& a = values.at(name);
      const Graph& g = *programs.step(0).graph;
      const GraphInput& in = g.inputs()[static_cast<size_t>(g.input_index(name))];
      out[name] = ShardedArray(a.shape, {});
      for (int64_t d : mine.local())
        if (is_first_holder(mine.mesh(), {in.sharding}, d)) {
          const Slice slice = shard_of(mine.mesh(), {in.sharding}, a.shape.dims, d);
          out[name].shards.push_back({slice, a.read(slice)});
        }
    }
    return out;
  }

  /// Reads the newest checkpoint in `from` as the processes do, and writes it to `to` as they would. Returns the bytes
  /// that each process read.
  std::vector<uint64_t> rewrite(const std::string& from, const std::string& to, int64_t at) const {
    const int64_t n = devices.mesh().devices();
    std::vector<uint64_t> read(static_cast<size_t>(n));
    std::vector<CheckpointContent> contents;
    for (int64_t p = 0; p < n; ++p) {
      const Devices mine = as_process(p);
      const HostState state = restored(mine, from);
      EXPECT_EQ(state.step, at);
      read[static_cast<size_t>(p)] = state.bytes_read;
      contents.push_back(state_content(programs.params(), owned(mine, state.values), step.ema_decay > 0));
      contents.back().state_json = read_file(checkpoint_folder(from, at) + "/" + kState);
    }
    const auto errors = as_processes(n, [&](CheckpointProcesses of) {
      if (n == 1) of = {};
      write_checkpoint(to, at, contents[static_cast<size_t>(of.process)], of);
    });
    EXPECT_EQ(errors, std::vector<std::string>(static_cast<size_t>(n)));
    return read;
  }
};

/// All numeric contents of a checkpoint, by name.
HostArrays numbers_of(const std::string& dir, int64_t step) {
  CheckpointReader reader(checkpoint_folder(dir, step));
  reader.add_component("unet");
  HostArrays out;
  for (const auto& [name, a] : reader.arrays()) out[name] = reader.read(name).whole();
  return out;
}

struct Case {
  const char* name;
  std::vector<int64_t> devices;  // for resuming after the one
  double ema = 0;
  DType weights = DType::f32;
};

TEST(ShardedState, GoesFromOneToEightDevicesAndBackToTheBit) {
  for (const Case& c : {Case{"weights", {2, 4, 8, 4, 2, 1}}, Case{"averages", {4, 2, 1}, 0.9},
                        Case{"masters", {2, 4, 1}, 0, DType::bf16}}) {
    SCOPED_TRACE(c.name);
    TinyRun run;
    run.task.batch_size = 8;
    run.options.step.ema_decay = c.ema;
    run.options.step.scope.weights = c.weights;
    run.train(2);
    const HostArrays expected = numbers_of(run.options.checkpoint_dir(), 2);
    std::string from = run.options.checkpoint_dir();
    int64_t before = 1;
    for (int64_t n : c.devices) {
      SCOPED_TRACE(fmt::format("{} → {}", before, n));
      const std::string to = run.folder / fmt::format("of_{}_after_{}", n, before);
      Traced(run, fsdp(n), n).rewrite(from, to, 2);
      EXPECT_EQ(exists(to + "/2/training_state/index.json"), n > 1);
      expect_same_bits(numbers_of(to, 2), expected);
      from = to;
      before = n;
    }
  }
}

TEST(ShardedState, ResumesOnAnotherMesh) {
  TinyRun whole, parts;
  for (TinyRun* run : {&whole, &parts}) {
    run->task.batch_size = 8;
    run->options.step.ema_decay = 0;
    run->train(2);
  }
  const std::string whole_folder = parts.options.checkpoint_dir(), shards = parts.folder / "pieces";
  Traced(parts, fsdp(8), 8).rewrite(whole_folder, shards, 2);
  parts.options.keys.checkpoint_dir = shards;
  parts.devices = Devices::open("cpu", 2, {.ici_data_parallelism = 1, .ici_tensor_parallelism = 2});
  expect_same_bits(parts.train(2).values, whole.train(2).values);  // nothing is done
  const HostArrays found = parts.train(4).values, expected = whole.train(4).values;
  for (const auto& [name, a] : expected) {
    const std::vector<double> x = found.at(name).to_doubles(), y = a.to_doubles();
    for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-4) << name;
  }
}

TEST(ShardedState, EachProcessReadsWhatItsDevicesHold) {
  TinyRun run;
  run.task.batch_size = 8;
  run.options.step.ema_decay = 0;
  run.train(1);
  const std::string shards = run.folder / "pieces";
  Traced(run, fsdp(4), 4).rewrite(run.options.checkpoint_dir(), shards, 1);
  for (const std::string& dir : {run.options.checkpoint_dir(), shards}) {
    constexpr uint64_t kChunk = 64;
    const std::string list = dir + "/1/" + kChecksums;
    std::filesystem::remove(list);
    write_file_atomic(list, to_json(checksums_of(dir + "/1", files_under(dir + "/1"), kChunk), kChunk));
    const Traced eight(run, fsdp(8), 8);
    uint64_t headers = 0, all = 0;
    for (const auto& f : std::filesystem::recursive_directory_iterator(dir + "/1"))
      if (f.path().extension() == ".safetensors") {
        uint64_t length = 0;
        std::memcpy(&length, read_file(f.path()).data(), sizeof length);
        headers += length + sizeof length + kChunk;
        all += f.file_size();
      }
    for (int64_t p : {0, 5}) {
      const HostState state = eight.restored(eight.as_process(p), dir);
      uint64_t held = 0, split = 0, runs = 0;
      for (const auto& [name, a] : state.values) {
        const Param* param = eight.programs.params().find(name.substr(name.starts_with("adam_") ? 7 : 0));
        if (!param) continue;
        ASSERT_EQ(a.shards.size(), 1u) << name;
        const Slice& slice = a.shards[0].slice;
        held += a.shards[0].values.bytes();
        split += slice.size != a.shape.dims;
        // Contiguous runs of a quarter shard equal those of the whole array, or are parts of them.
        each_run(slice, Slice::all(a.shape.dims), [&](int64_t, int64_t) { ++runs; });
      }
      EXPECT_GT(split, 50u);
      EXPECT_GE(state.bytes_read, held);
      EXPECT_LE(state.bytes_read, held + headers + 2 * kChunk * runs);
      EXPECT_LT(held, (all - headers) / 2);
    }
  }
}

}  // namespace
}  // namespace md
