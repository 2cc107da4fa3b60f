// Checkpoints of several processes: each is a thread of this one with its shards, and all share a folder.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/test_processes.h"

namespace md {
namespace {

namespace fs = std::filesystem;

HostArray counting(Dims dims, float first) {
  HostArray a(Shape{DType::f32, std::move(dims)});
  auto v = a.mutable_view<float>();
  std::iota(v.begin(), v.end(), first);
  return a;
}

bool same(const HostArray& a, const HostArray& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

std::set<std::string> names_in(const std::string& dir) {
  std::set<std::string> out;
  for (const auto& f : fs::directory_iterator(dir)) out.insert(f.path().filename());
  return out;
}

/// Relative path → bytes of every file below.
std::map<std::string, std::string> list_files(const std::string& dir) {
  std::map<std::string, std::string> out;
  for (const auto& f : fs::recursive_directory_iterator(dir))
    if (f.is_regular_file()) out[fs::relative(f.path(), dir)] = read_file(f.path());
  return out;
}

/// Part `i` of `n` along an axis.
Slice part(const Dims& dims, size_t axis, int64_t i, int64_t n) {
  Slice s = Slice::all(dims);
  s.size[axis] = dims[axis] / n;
  s.start[axis] = i * s.size[axis];
  return s;
}

const std::vector<std::string> kNoErrors2(2), kNoErrors4(4);

/// The arrays of a training state; a mix of two values would show.
HostArrays arrays_of(float value) {
  return {{"rows", counting({8, 3}, value)},
          {"columns", counting({3, 8}, value + 100)},
          {"grid", counting({4, 2, 8}, value + 200)},
          {"bias", counting({5}, value + 300)},
          {"step", counting({}, value)}};
}

/// The part of process p: rows, columns and a grid are split, the step is in process 0, the bias in the last one.
CheckpointContent content_of(int64_t p, int64_t n, float value) {
  CheckpointContent c;
  const auto all = arrays_of(value);
  auto add = [&](const std::string& name, const std::vector<Slice>& slices) {
    ShardedArray a{all.at(name).shape(), {}};
    for (const Slice& s : slices) a.shards.push_back({s, ShardedArray(all.at(name)).read(s)});
    c.state[name] = a;
  };
  add("rows", {part({8, 3}, 0, p, n)});
  add("columns", {part({3, 8}, 1, 2 * p, 2 * n), part({3, 8}, 1, 2 * p + 1, 2 * n)});
  Slice grid = part({4, 2, 8}, 0, p % 2, 2);
  if (n == 4) grid.start[2] = p / 2 * 4, grid.size[2] = 4;
  add("grid", {grid});
  add("bias", p == n - 1 ? std::vector{Slice::all({5})} : std::vector<Slice>{});
  add("step", p == 0 ? std::vector{Slice{}} : std::vector<Slice>{});
  c.files["model_index.json"] = "{}";
  c.state_json = "{\"value\": " + std::to_string(value) + "}";
  return c;
}

void expect_arrays(const std::string& dir, int64_t step, float value) {
  const CheckpointContent c = read_training_state(dir, step);
  EXPECT_EQ(c.state_json, content_of(0, 2, value).state_json);
  const auto expected = arrays_of(value);
  ASSERT_EQ(c.state.size(), expected.size());
  for (const auto& [name, a] : expected) {
    const ShardedArray& shards = c.state.at(name);
    EXPECT_TRUE(same(shards.whole(), a)) << name;
    for (size_t axis = 0; axis < a.dims().size(); ++axis)
      for (int64_t n = 1; n <= a.dims()[axis]; ++n)
        for (int64_t i = 0; i < n; ++i) {
          const Slice s = part(a.dims(), axis, i, n);
          EXPECT_TRUE(same(shards.read(s), ShardedArray(a).read(s))) << name << " " << to_string(s);
        }
  }
}

TEST(CheckpointOfProcesses, IsReadUnderAnyOtherSplit) {
  for (int64_t n : {2, 4}) {
    TemporaryFolder t;
    const auto errors = as_processes(
        n, [&](const CheckpointProcesses& of) { write_checkpoint(t.path(), 7, content_of(of.process, n, 1), of); });
    ASSERT_EQ(errors, std::vector<std::string>(static_cast<size_t>(n)));
    EXPECT_EQ(names_in(t.path()), std::set<std::string>{"7"});
    std::set<std::string> files = {"state.json", "arrays.safetensors", "index.json", "checksums.json"};
    for (int64_t p = 0; p < n; ++p) files.insert(fmt::format("pieces-{:05}-of-{:05}.safetensors", p, n));
    EXPECT_EQ(names_in(t / "7/training_state"), files);
    expect_arrays(t.path(), 7, 1);
    // Writes the same step again, and from another number of processes.
    const auto again = as_processes(6 - n, [&](const CheckpointProcesses& of) {
      write_checkpoint(t.path(), 7, content_of(of.process, 6 - n, 2), of);
    });
    ASSERT_EQ(again, std::vector<std::string>(static_cast<size_t>(6 - n)));
    EXPECT_EQ(names_in(t.path()), std::set<std::string>{"7"});
    expect_arrays(t.path(), 7, 2);
  }
}

TEST(CheckpointOfProcesses, HasTheFilesOfOneProcessWhereTheFirstHoldsEverything) {
  TemporaryFolder t;
  CheckpointContent all;
  all.weights["unet"] = as_shards({{"conv_in.weight", counting({4, 3}, 0)}, {"conv_in.bias", counting({4}, 9)}});
  all.files["unet/config.json"] = "{}";
  all.state = as_shards(arrays_of(3));
  all.state_json = "{}";
  write_checkpoint(t.path(), 1, all);
  // Splits the arrays into shards that all belong to this process.
  CheckpointContent cut = all;
  for (auto& [name, a] : cut.state) {
    if (a.shape.dims.empty() || a.shape.dims[0] != 8) continue;
    const ShardedArray whole = a;
    a.shards.clear();
    for (int64_t i : {2, 0, 3, 1}) {
      const Slice s = part(a.shape.dims, 0, i, 4);
      a.shards.push_back({s, whole.read(s)});
    }
  }
  write_checkpoint(t.path(), 2, cut);
  const auto errors = as_processes(2, [&](const CheckpointProcesses& of) {
    CheckpointContent none;
    for (const auto& [name, a] : all.state) none.state[name] = ShardedArray(a.shape, {});
    for (const auto& [name, a] : all.weights["unet"]) none.weights["unet"][name] = ShardedArray(a.shape, {});
    write_checkpoint(t.path(), 3, of.process == 0 ? cut : none, of);
  });
  ASSERT_EQ(errors, kNoErrors2);
  EXPECT_EQ(list_files(t / "1").size(), 5u);
  EXPECT_EQ(list_files(t / "2"), list_files(t / "1"));
  EXPECT_EQ(list_files(t / "3"), list_files(t / "1"));
}

TEST(CheckpointOfProcesses, HasShardsOfWeightsThatAreWhole) {
  for (bool first_has_some : {true, false}) {
    TemporaryFolder t;
    const auto errors = as_processes(4, [&](const CheckpointProcesses& of) {
      CheckpointContent c;
      const auto value = static_cast<float>(of.process);
      if (of.process == 2 || of.process == 3 || (of.process == 0 && first_has_some))
        c.weights["unet"][fmt::format("down.{}.weight", of.process)] = counting({4, 3}, value);
      if (of.process == 1) c.weights["text_encoder"]["norm.weight"] = counting({4}, 5);
      c.state_json = "{}";
      write_checkpoint(t.path(), 1, c, of);
    });
    ASSERT_EQ(errors, kNoErrors4);
    const std::string stem = "diffusion_pytorch_model";
    std::set<std::string> names = {stem + ".safetensors.index.json"};
    for (int i = 1; i <= 2 + first_has_some; ++i)
      names.insert(fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i, 2 + first_has_some));
    EXPECT_EQ(names_in(t / "1/unet"), names);
    EXPECT_EQ(names_in(t / "1/text_encoder"), std::set<std::string>{"model.safetensors"});
    EXPECT_EQ(names_in(t / "1/training_state"),
              (std::set<std::string>{"arrays.safetensors", "checksums.json", "state.json"}));
    const auto unet = SafetensorsReader::open(t / "1/unet").tensors();
    EXPECT_EQ(unet.size(), names.size() - 1);
    EXPECT_TRUE(same(unet.at("down.3.weight"), counting({4, 3}, 3)));
  }
}

TEST(CheckpointOfProcesses, HasWeightsThatAreSplitInItsTrainingState) {
  TemporaryFolder t;
  const HostArray weight = counting({4, 6}, 0), bias = counting({6}, 50), norm = counting({3}, 90);
  const auto errors = as_processes(4, [&](const CheckpointProcesses& of) {
    CheckpointContent c;
    if (of.process < 2) {
      const Slice s = part({4, 6}, 1, of.process, 2);
      c.weights["unet"]["w"] = {weight.shape(), {{s, ShardedArray(weight).read(s)}}};
    }
    if (of.process == 0) c.weights["unet"]["b"] = bias;
    if (of.process == 3) c.weights["unet"]["n"] = norm;  // holds no shard of the split arrays
    c.state_json = "{}";
    write_checkpoint(t.path(), 1, c, of);
  });
  ASSERT_EQ(errors, kNoErrors4);
  const NamedShards state = read_training_state(t.path(), 1).state;
  EXPECT_EQ(state.size(), 3u);
  EXPECT_TRUE(same(state.at("weights/unet/w").whole(), weight));
  EXPECT_TRUE(same(state.at("weights/unet/w").read({{1, 1}, {2, 4}}), ShardedArray(weight).read({{1, 1}, {2, 4}})));
  EXPECT_TRUE(same(state.at("weights/unet/b").whole(), bias));
  EXPECT_TRUE(same(state.at("weights/unet/n").whole(), norm));
  EXPECT_THROW(SafetensorsReader::open(t / "1/unet"), Error);
}

TEST(CheckpointOfProcesses, IsNotThereWhenAProcessIsLost) {
  for (int64_t lost : {0, 1, 3}) {
    TemporaryFolder t;
    ASSERT_EQ(
        as_processes(
            4, [&](const CheckpointProcesses& of) { write_checkpoint(t.path(), 1, content_of(of.process, 4, 1), of); }),
        kNoErrors4);
    for (int before : {1, 2, 3, 4}) {  // the gather call that fails
      const auto errors = as_processes(4, [&](CheckpointProcesses of) {
        int met = 0;
        auto gather = of.gather;
        of.gather = [&](const std::string& mine) {
          if (of.process == lost && ++met == before) fail(Code::internal, "lost");
          return gather(mine);
        };
        write_checkpoint(t.path(), 2, content_of(of.process, 4, 2), of);
      });
      for (const std::string& e : errors)
        // The others fail at the barrier or earlier: the folder of a failed save may already be deleted.
        EXPECT_TRUE(e.find(&e == &errors[static_cast<size_t>(lost)] ? "lost" : "a process is gone") !=
                        std::string::npos ||
                    e.find("earlier checkpoints are untouched") != std::string::npos)
            << e;
      EXPECT_EQ(list_checkpoints(t.path()), std::vector<int64_t>{1});
      expect_arrays(t.path(), 1, 1);
      CheckpointWriter next(t.path(), 0, {.process = 0, .processes = 4, .gather = {}, .put = {}, .get = {}});
      EXPECT_EQ(names_in(t.path()), std::set<std::string>{"1"});
    }
  }
}

TEST(CheckpointOfProcesses, WithMissingOrRepeatedShardsIsRefused) {
  TemporaryFolder t;
  auto refusal = [&](int64_t n, auto&& change) {
    const auto errors = as_processes(n, [&](const CheckpointProcesses& of) {
      CheckpointContent c = content_of(of.process, n, 1);
      change(of.process, c);
      CheckpointProcesses quiet = of;
      if (n == 1) quiet.gather = nullptr;
      write_checkpoint(t.path(), 1, c, quiet);
    });
    EXPECT_TRUE(names_in(t.path()).empty());
    return errors[0];
  };
  std::string e = refusal(2, [](int64_t p, CheckpointContent& c) {
    if (p == 1) c.state.erase("rows");
  });
  EXPECT_NE(e.find("array 'rows': the shards hold 12 of 24 elements of [8,3]"), std::string::npos) << e;
  e = refusal(2, [](int64_t, CheckpointContent& c) { c.state["bias"] = counting({5}, 0); });
  EXPECT_NE(e.find("array 'bias': the shards [0:5] and [0:5] overlap"), std::string::npos) << e;
  e = refusal(2, [](int64_t p, CheckpointContent& c) {
    if (p == 1) c.state["rows"].shape.dims = {9, 3};
  });
  EXPECT_NE(e.find("array 'rows': it is f32[9,3], elsewhere f32[8,3]"), std::string::npos) << e;
  e = refusal(2, [](int64_t, CheckpointContent& c) { c.state["rows"].shards[0].slice.size[0] = 2; });
  EXPECT_NE(e.find("array 'rows': the shard [0:2,0:3] is f32[4,3]; expected f32[2,3]"), std::string::npos) << e;
  e = refusal(1, [](int64_t, CheckpointContent& c) { c.state.erase("bias"), c.state.erase("rows"); });
  EXPECT_NE(e.find("array 'grid': the shards hold 32 of 64 elements of [4,2,8]"), std::string::npos) << e;
}

TEST(CheckpointOfProcesses, WithADamagedIndexIsRefusedByName) {
  TemporaryFolder t;
  ASSERT_EQ(
      as_processes(
          2, [&](const CheckpointProcesses& of) { write_checkpoint(t.path(), 1, content_of(of.process, 2, 1), of); }),
      kNoErrors2);
  fs::remove(t / "1/training_state/checksums.json");  // it would name the file first
  const std::string index = t / "1/training_state/index.json", good = read_file(index);
  auto refusal = [&](const std::string& text) -> std::string {
    write_file_atomic(index, text);
    try {
      read_training_state(t.path(), 1);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::io);
      EXPECT_NE(e.message().find(index), std::string::npos) << e.message();
      return e.message();
    }
    return "nothing was thrown";
  };
  auto with = [&](const std::string& from, const std::string& to) {
    const size_t at = good.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    std::string text = good;
    return text.replace(at, from.size(), to);
  };
  auto expect = [&](const std::string& text, const std::string& part) {
    const std::string e = refusal(text);
    EXPECT_NE(e.find(part), std::string::npos) << e;
  };
  expect(good.substr(0, good.size() / 2), "not JSON");
  expect("[]", "not JSON with an object 'arrays'");
  expect(with("\"F32\"", "\"F31\""), "unknown element type F31");
  expect(with("\"F32\"", "\"C64\""), "has the element type C64; expected one of");
  expect(with("\"F32\"", "\"I32\""), "array 'bias': 'bias@0' in");
  expect(with("\"bias@0\"", "\"bias@1\""), "'bias@1' should be in");
  expect(with("training_state/pieces-00001", "../1/pieces-00001"), "is not a file inside the checkpoint");
  expect(with("\"offset\"", "\"upset\""), "array 'bias': ");
  // The second half of the columns, moved onto the first.
  const size_t columns = good.find("columns@0,4");
  ASSERT_NE(columns, std::string::npos);
  std::string moved = good;
  moved.replace(moved.find("\n      4\n", columns) + 7, 1, "0");
  expect(moved, "array 'columns': the shards");
  write_file_atomic(index, good);
  expect_arrays(t.path(), 1, 1);
  fs::remove(t / "1/training_state/pieces-00001-of-00002.safetensors");
  try {
    read_training_state(t.path(), 1);
    FAIL() << "read without one of its files";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("pieces-00001-of-00002.safetensors"), std::string::npos) << e.message();
  }
}

TEST(CheckpointOfProcesses, KeepsTheNewest) {
  TemporaryFolder t;
  ASSERT_EQ(as_processes(2,
                         [&](const CheckpointProcesses& of) {
                           CheckpointWriter w(t.path(), 2, of);
                           for (int64_t step : {1, 2, 3})
                             w.save(step, [&, step] { return content_of(of.process, 2, static_cast<float>(step)); });
                           w.finish();
                         }),
            kNoErrors2);
  EXPECT_EQ(names_in(t.path()), (std::set<std::string>{"2", "3"}));
  expect_arrays(t.path(), 3, 3);
}

}  // namespace
}  // namespace md
