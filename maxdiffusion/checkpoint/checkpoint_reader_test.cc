// Checkpoints written by several processes: which bytes the reader reads, and that it verifies all of them.
#include "maxdiffusion/checkpoint/checkpoint_reader.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
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

/// Part `i` of `n` along an axis.
Slice part(const Dims& dims, size_t axis, int64_t i, int64_t n) {
  Slice s = Slice::all(dims);
  s.size[axis] = dims[axis] / n;
  s.start[axis] = i * s.size[axis];
  return s;
}

/// A checkpoint of `n` processes, each of which holds its rows of every array; a checksum covers one element.
struct Saved {
  TemporaryFolder t;
  std::string folder = t / "5";
  HostArray moments = counting({8, 6}, 0), layer0 = counting({8, 4}, 100), layer1 = counting({8, 4}, 200),
            step = counting({}, 5);

  explicit Saved(int64_t n) {
    const auto errors = as_processes(n, [&](const CheckpointProcesses& of) {
      const auto rows = [&](const HostArray& a) {
        const Slice s = part(a.dims(), 0, of.process, n);
        return ShardedArray(a.shape(), {{s, ShardedArray(a).read(s)}});
      };
      CheckpointContent c;
      c.state["adam_m/unet/w"] = rows(moments);
      c.state["step"] = of.process == 0 ? ShardedArray(step) : ShardedArray(step.shape(), {});
      c.weights["unet"]["blocks.0.w"] = rows(layer0);
      c.weights["unet"]["blocks.1.w"] = rows(layer1);
      c.files["unet/config.json"] = "{}";
      c.state_json = "{}";
      write_checkpoint(t.path(), 5, c, n == 1 ? CheckpointProcesses{} : of);
    });
    EXPECT_EQ(errors, std::vector<std::string>(static_cast<size_t>(n)));
    chunks_of(sizeof(float));
  }
  void chunks_of(uint64_t bytes) const {
    fs::remove(folder + "/" + kChecksums);
    write_file_atomic(folder + "/" + kChecksums, to_json(checksums_of(folder, files_under(folder), bytes), bytes));
  }
  /// Bytes of the file's header, including its length field.
  uint64_t header(const std::string& file) const {
    uint64_t length = 0;
    std::memcpy(&length, read_file(folder + "/" + file).data(), sizeof length);
    return sizeof length + length;
  }
};

TEST(CheckpointReader, ReadsTheBytesOfTheRequestedPartsOnly) {
  const Saved s(4);
  CheckpointReader reader(s.folder);
  EXPECT_EQ(reader.bytes_read(), 0u);  // the index holds the shapes
  EXPECT_TRUE(reader.add_component("unet"));
  reader.add_stack("weights/unet/blocks.*.w", 2);
  // Rows 2 and 3 are the second process's; columns 2 and 3 are in all files.
  EXPECT_TRUE(same(reader.read("adam_m/unet/w", {part({8, 6}, 0, 1, 4)}).shards[0].values,
                   ShardedArray(s.moments).read(part({8, 6}, 0, 1, 4))));
  uint64_t expected = s.header("training_state/pieces-00001-of-00004.safetensors") + sizeof(float[2][6]);
  EXPECT_EQ(reader.bytes_read(), expected);
  EXPECT_TRUE(same(reader.read("adam_m/unet/w", {part({8, 6}, 1, 1, 3)}).shards[0].values,
                   ShardedArray(s.moments).read(part({8, 6}, 1, 1, 3))));
  for (int p : {0, 2, 3}) expected += s.header(fmt::format("training_state/pieces-0000{}-of-00004.safetensors", p));
  expected += sizeof(float[8 - 2][2]);  // two rows were read before
  EXPECT_EQ(reader.bytes_read(), expected);
  // One row of each layer, as one array.
  const Slice row{{0, 7, 0}, {2, 1, 4}};
  const ShardedArray stack = reader.read("weights/unet/blocks.*.w", {row});
  EXPECT_EQ(stack.shape, (Shape{DType::f32, {2, 8, 4}}));
  const Slice last{{7, 0}, {1, 4}};
  EXPECT_TRUE(same(stack.shards[0].values.reshaped({2, 4}), [&] {
    HostArray both(Shape{DType::f32, {2, 4}});
    std::memcpy(both.mutable_data(), ShardedArray(s.layer0).read(last).data(), 16);
    std::memcpy(both.mutable_data() + 16, ShardedArray(s.layer1).read(last).data(), 16);
    return both;
  }()));
  expected += sizeof(float[2][4]);
  EXPECT_EQ(reader.bytes_read(), expected);
  reader.read("adam_m/unet/w", {part({8, 6}, 1, 1, 3)});  // second time
  EXPECT_EQ(reader.bytes_read(), expected);
}

TEST(CheckpointReader, ReadsPartsOfWholeFilesToo) {
  const Saved s(1);
  EXPECT_FALSE(exists(s.folder + "/training_state/index.json"));
  CheckpointReader reader(s.folder);
  EXPECT_FALSE(reader.add_component("vae"));
  EXPECT_TRUE(reader.add_component("unet"));
  const std::string weights = "unet/diffusion_pytorch_model.safetensors";
  const uint64_t headers = s.header("training_state/arrays.safetensors") + s.header(weights);
  EXPECT_EQ(reader.bytes_read(), headers);
  const Slice half = part({8, 4}, 0, 1, 2);
  EXPECT_TRUE(same(reader.read("weights/unet/blocks.1.w", {half}).shards[0].values, ShardedArray(s.layer1).read(half)));
  EXPECT_EQ(reader.bytes_read(), headers + sizeof(float[4][4]));
  s.chunks_of(50);
  CheckpointReader coarse(s.folder);
  coarse.add_component("unet");
  const auto up = [](uint64_t n) { return (n + 49) / 50 * 50; };
  const auto whole = [&](const std::string& file) { return fs::file_size(s.folder + "/" + file); };
  EXPECT_EQ(coarse.bytes_read(),
            std::min(up(s.header("training_state/arrays.safetensors")), whole("training_state/arrays.safetensors")) +
                std::min(up(s.header(weights)), whole(weights)));
  coarse.read("weights/unet/blocks.1.w");
  coarse.read("weights/unet/blocks.0.w");
  coarse.read("adam_m/unet/w");
  coarse.read("step");
  EXPECT_EQ(coarse.bytes_read(), whole(weights) + whole("training_state/arrays.safetensors"));
}

/// Reads the part of process `p` of `n` and returns the error message.
std::string fault_of(const std::string& folder, int64_t p, int64_t n) {
  try {
    CheckpointReader reader(folder);
    if (!reader.add_component("unet")) return "no unet";
    for (const auto& [name, a] : reader.arrays())
      reader.read(name, {a.shape.rank() == 0 ? Slice{} : part(a.shape.dims, 0, p, n)});
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io) << e.what();
    return e.what();
  }
  return "";
}

TEST(CheckpointReader, AFlippedBitAnywhereIsFoundWhenRead) {
  for (int64_t n : {1, 2}) {
    const Saved s(n);
    s.chunks_of(64);
    ASSERT_EQ(fault_of(s.folder, 0, 2) + fault_of(s.folder, 1, 2), "");
    int64_t flips = 0, found_by_one = 0;
    for (const auto& f : fs::recursive_directory_iterator(s.folder)) {
      const std::string name = f.path().filename();
      // Users may edit configs, so a change only causes a warning.
      if (!f.is_regular_file() || name == "checksums.json" || name.ends_with("config.json")) continue;
      const std::string good = read_file(f.path());
      std::fstream file(f.path(), std::ios::in | std::ios::out | std::ios::binary);
      const auto put = [&](size_t at, int byte) {
        file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(byte)).flush();
      };
      for (size_t at = 0; at < good.size(); at += 3, ++flips) {
        put(at, good[at] ^ (1 << (at / 3 % 8)));
        const std::string first = fault_of(s.folder, 0, 2), second = fault_of(s.folder, 1, 2);
        EXPECT_NE((first + second).find(f.path().string()), std::string::npos) << f.path() << " " << at;
        found_by_one += first.empty() != second.empty();
        put(at, good[at]);
      }
    }
    EXPECT_GT(flips, 250);
    EXPECT_GT(found_by_one, 30) << "each reads its own half";
  }
}

TEST(CheckpointReader, ComparesWholeFilesWhereChecksumsAreOfThoseAlone) {
  const Saved s(2);
  const std::string list = s.folder + "/" + kChecksums;
  nlohmann::json j = nlohmann::json::parse(read_file(list));
  j.erase("chunk_bytes");
  for (auto& [name, file] : j["files"].items()) file.erase("chunks");
  write_file_atomic(list, j.dump());
  EXPECT_EQ(fault_of(s.folder, 0, 2) + fault_of(s.folder, 1, 2), "");
  const std::string shards = s.folder + "/training_state/pieces-00001-of-00002.safetensors";
  std::string bytes = read_file(shards);
  bytes.back() ^= 1;
  write_file_atomic(shards, bytes);
  EXPECT_EQ(fault_of(s.folder, 0, 2), "") << "it does not open that file";
  EXPECT_NE(fault_of(s.folder, 1, 2).find(shards + "': its bytes differ"), std::string::npos);
}

// Five layers as stacks of three and two, and others as single arrays, of one process and of two.
TEST(CheckpointReader, StacksLayersOtherwise) {
  const HostArray first = counting({3, 8, 2}, 0), second = counting({2, 8, 2}, 48), v0 = counting({1, 8}, 100),
                  v1 = counting({1, 8}, 200), all = counting({5, 8, 2}, 0);
  for (const int64_t n : {1, 2}) {
    TemporaryFolder t;
    as_processes(n, [&](const CheckpointProcesses& of) {
      const auto share = [&](const HostArray& a) {
        const Slice s = part(a.dims(), 1, of.process, n);
        return ShardedArray(a.shape(), {{s, ShardedArray(a).read(s)}});
      };
      CheckpointContent c;
      c.state = {
          {"m/b.*.w", share(first)}, {"m/b.*+3.w", share(second)}, {"v/b.0.w", share(v0)}, {"v/b.1.w", share(v1)}};
      c.state_json = "{}";
      write_checkpoint(t.path(), 5, c, n == 1 ? CheckpointProcesses{} : of);
    });
    CheckpointReader reader(t / "5");
    const auto read = [&](const char* name, const Dims& dims) {
      const std::optional<std::string> found = reader.with_layers(name, dims);
      EXPECT_TRUE(found) << name;
      return found ? reader.read(*found).whole() : HostArray();
    };
    EXPECT_EQ(reader.with_layers("m/b.*+3.w", {2, 8, 2}), "m/b.*+3.w") << "as it is";
    EXPECT_TRUE(same(read("m/b.*.w", {5, 8, 2}), all));
    EXPECT_TRUE(same(read("m/b.*.w", {2, 8, 2}), rows(all, 0, 2)));
    EXPECT_TRUE(same(read("m/b.*+2.w", {3, 8, 2}), rows(all, 2, 3)));
    EXPECT_TRUE(same(read("m/b.4.w", {8, 2}), row_of(all, 4)));
    EXPECT_TRUE(same(read("m/b.4.w", {1, 8, 2}), rows(all, 4, 1)));
    const HostArray v = read("v/b.*.w", {2, 8});
    EXPECT_TRUE(same(row_of(v, 0), row_of(v0, 0)) && same(row_of(v, 1), row_of(v1, 0)));
    EXPECT_FALSE(reader.with_layers("m/b.*+2.w", {4, 8, 2})) << "there is no layer 5";
    EXPECT_FALSE(reader.with_layers("m/b.*.w", {5, 8, 3})) << "layers have other sizes";
    EXPECT_FALSE(reader.with_layers("m/c.*.w", {2, 8, 2}));
    const ShardedArray half = reader.read("layers of m/b.*+2.w", {{{1, 4, 0}, {2, 2, 2}}});
    EXPECT_TRUE(same(half.shards.at(0).values, ShardedArray(all).read({{3, 4, 0}, {2, 2, 2}})));
  }
}

}  // namespace
}  // namespace md
