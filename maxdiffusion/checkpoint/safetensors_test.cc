#include "maxdiffusion/checkpoint/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/half.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

namespace fs = std::filesystem;
const std::string kGolden = std::string(MD_SOURCE_DIR) + "/tests/golden/safetensors/";

/// Elements 0, 1, 2, … (pred: their parity), as tools/golden/safetensors_files.py makes them.
HostArray counting(DType dtype, Dims dims) {
  HostArray a(Shape{dtype, std::move(dims)});
  for (int64_t i = 0; i < a.shape().elements(); ++i)
    store_element(dtype, a.mutable_data() + i * static_cast<int64_t>(size_of(dtype)),
                  static_cast<double>(dtype == DType::pred ? i % 2 : i));
  return a;
}

HostArrays all_types() {
  const std::pair<const char*, DType> types[] = {{"bool", DType::pred},
                                                 {"uint8", DType::u8},
                                                 {"int8", DType::s8},
                                                 {"float8_e5m2", DType::f8e5m2},
                                                 {"float8_e4m3fn", DType::f8e4m3fn},
                                                 {"int16", DType::s16},
                                                 {"uint16", DType::u16},
                                                 {"float16", DType::f16},
                                                 {"bfloat16", DType::bf16},
                                                 {"int32", DType::s32},
                                                 {"uint32", DType::u32},
                                                 {"float32", DType::f32},
                                                 {"float64", DType::f64},
                                                 {"int64", DType::s64},
                                                 {"uint64", DType::u64}};
  HostArrays out;
  for (const auto& [name, dtype] : types) out.emplace(std::string("t.") + name, counting(dtype, {2, 3}));
  return out;
}

HostArrays odd_shapes() {
  return {{"scalar", counting(DType::f32, {})},
          {"empty", counting(DType::f32, {0, 4})},
          {"b.odd", counting(DType::u8, {5})},
          {"a.odd", counting(DType::bf16, {3})},
          {"名前", counting(DType::f32, {1})}};
}

void expect_same(const HostArrays& got, const HostArrays& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, w] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    const HostArray& g = got.at(name);
    EXPECT_EQ(g.shape(), w.shape()) << name;
    EXPECT_EQ(0, std::memcmp(g.data(), w.data(), w.bytes())) << name;
  }
}

/// A file of this header text and `data_bytes` zero bytes.
std::string raw(const TemporaryFolder& t, const std::string& header, size_t data_bytes) {
  std::string path = t / "x.safetensors";
  uint64_t n = header.size();
  std::ofstream f(path, std::ios::binary);
  f.write(reinterpret_cast<const char*>(&n), 8);
  f << header << std::string(data_bytes, '\0');
  return path;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io) << e.what();
    return e.what();
  }
  return "no error";
}

std::string open_error(const std::string& path) {
  return error_of([&] { SafetensorsReader::open(path); });
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(SafetensorsReader, ReadsWhatTheReferenceWrites) {
  auto r = SafetensorsReader::open(kGolden + "all_types.safetensors");
  expect_same(r.tensors(), all_types());
  EXPECT_EQ(r.metadata().at("format"), "pt");
  EXPECT_EQ(r.file_of("t.int8"), kGolden + "all_types.safetensors");
  expect_same(SafetensorsReader::open(kGolden + "shapes.safetensors").tensors(), odd_shapes());
}

TEST(SafetensorsWriter, WritesTheReferencesBytes) {
  TemporaryFolder t;
  write_safetensors(t / "a", all_types());
  EXPECT_EQ(read_file(t / "a"), read_file(kGolden + "all_types.safetensors"));
  write_safetensors(t / "b", odd_shapes(), {});
  EXPECT_EQ(read_file(t / "b"), read_file(kGolden + "shapes.safetensors"));
}

TEST(SafetensorsWriter, WritesAFileWithoutTensors) {
  TemporaryFolder t;
  write_safetensors(t / "a.safetensors", HostArrays());
  EXPECT_TRUE(SafetensorsReader::open(t / "a.safetensors").tensors().empty());
}

TEST(SafetensorsReader, RefusesEveryLyingHeader) {
  TemporaryFolder t;
  const struct {
    const char* header;
    size_t data;
    const char* message;
  } cases[] = {
      {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}", 8, "not JSON"},
      {R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}})", 8, "not JSON"},
      {"[1]", 0, "begin with '{'"},
      {"", 0, "begin with '{'"},
      {R"({"a":1})", 0, "not an object"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "no 'data_offsets'"},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8, "no 'dtype'"},
      {R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", 8, "tensor 'a' has the unknown element type F99"},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", 8, "dtype is 7, not a text"},
      {R"({"a":{"dtype":"F32","shape":"2","data_offsets":[0,8]}})", 8, "not a list"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "whole number"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "whole number"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "takes 12 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8, "not fit into memory"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8, "not fit into memory"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "do not span"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", 8, "not [begin, end]"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7, "truncated: tensor 'a' ends at byte 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 9, "1 bytes follow"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "leaving a hole"},
      {R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}})",
       12, "overlaps"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "'a' is named twice"},
      {R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1, "'dtype' is named twice"},
      {R"({"__metadata__":{"n":1}})", 0, "not a text"},
      {R"({"__metadata__":1})", 0, "not an object"},
  };
  for (const auto& c : cases) {
    std::string path = raw(t, c.header, c.data), e = open_error(path);
    EXPECT_TRUE(has(e, c.message) && has(e, path)) << c.header << "\n" << e;
  }
}

TEST(SafetensorsReader, TypesThatAreNotReadAreNoDamage) {
  TemporaryFolder t;
  for (const char* type : {"F8_E8M0", "F4", "C64"}) {
    const std::string header = fmt::format(R"({{"a":{{"dtype":"{}","shape":[1],"data_offsets":[0,1]}}}})", type),
                      e = open_error(raw(t, header.c_str(), 1));
    EXPECT_TRUE(has(e, fmt::format("tensor 'a' has the element type {}; expected one of BOOL, U8, ", type))) << e;
    EXPECT_TRUE(has(e, "try: a file of these weights in another type")) << e;
    EXPECT_FALSE(has(e, "damaged") || has(e, "unknown")) << e;
  }
  EXPECT_TRUE(has(open_error(raw(t, R"({"a":{"dtype":"F99","shape":[1],"data_offsets":[0,1]}})", 1)), "it is damaged"));
}

TEST(SafetensorsReader, ALinkToNothingIsAnIncompleteDownload) {
  TemporaryFolder t;
  fs::create_symlink("../../blobs/abc", t / "model.safetensors");
  for (const std::string& path : {t.path(), t / "model.safetensors"}) {
    const std::string e = open_error(path);
    EXPECT_TRUE(has(e,
                    "model.safetensors' is a link to '../../blobs/abc', which does not exist: its download is "
                    "incomplete"))
        << e;
    EXPECT_TRUE(has(e, "try: download the model again")) << e;
    EXPECT_FALSE(has(e, "damaged")) << e;
  }
  std::ofstream(t / "model.safetensors.index.json") << R"({"weight_map":{"a":"model.safetensors"}})";
  EXPECT_TRUE(has(open_error(t / "model.safetensors.index.json"), "its download is incomplete"));
}

TEST(SafetensorsReader, RefusesImpossibleHeaderLengths) {
  TemporaryFolder t;
  auto with_length = [&](uint64_t n) {
    std::ofstream f(t / "y", std::ios::binary);
    f.write(reinterpret_cast<const char*>(&n), 8);
    f << "{}";
    f.close();
    return open_error(t / "y");
  };
  EXPECT_TRUE(has(with_length(3), "truncated: header of 3 bytes in a file of 10 bytes"));
  EXPECT_TRUE(has(with_length(100'000'001), "over the limit"));
  EXPECT_TRUE(has(with_length(~0ull), "over the limit"));
  std::ofstream(t / "empty").close();
  EXPECT_TRUE(has(open_error(t / "empty"), "truncated"));
  EXPECT_TRUE(has(open_error(t / "absent"), "No such file"));
}

TEST(SafetensorsReader, RefusesAFileCutAtAnyByte) {
  TemporaryFolder t;
  write_safetensors(t / "cut", all_types());
  for (size_t n = read_file(t / "cut").size(); n-- > 0;) {
    fs::resize_file(t / "cut", n);
    EXPECT_NE(open_error(t / "cut"), "no error") << "cut to " << n << " bytes";
  }
}

TEST(SafetensorsReader, ReadsOrRefusesAFileWithAnyByteOfItsHeaderChanged) {
  TemporaryFolder t;
  write_safetensors(t / "whole", odd_shapes());
  const std::string whole = read_file(t / "whole");
  const size_t header = 8 + static_cast<unsigned char>(whole[0]) + 256 * static_cast<unsigned char>(whole[1]);
  for (size_t i = 0; i < header; ++i) {
    for (char c : {'\0', '"', '9', '{', ']', '\xff'}) {
      std::string changed = whole;
      changed[i] = c;
      std::ofstream(t / "changed", std::ios::binary) << changed;
      try {  // the sanitizers watch for reads outside the file
        for (const auto& [name, array] : SafetensorsReader::open(t / "changed").tensors()) array.to_doubles();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Code::io);
      }
    }
  }
}

TEST(SafetensorsReader, AlignsWhatOldWritersLeftUnaligned) {
  TemporaryFolder t;
  std::string path = t / "x.safetensors", header = R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  while (header.size() % 4 != 1) header += ' ';
  uint64_t n = header.size();
  float value = 1.5f;
  std::ofstream f(path, std::ios::binary);
  f.write(reinterpret_cast<const char*>(&n), 8);
  f << header;
  f.write(reinterpret_cast<const char*>(&value), 4);
  f.close();
  EXPECT_EQ(SafetensorsReader::open(path).tensors().at("a").view<float>()[0], 1.5f);
}

TEST(ShardedSafetensors, ComeBackThroughTheIndex) {
  TemporaryFolder t;
  write_sharded_safetensors(t.path(), "diffusion_pytorch_model", all_types(), 60);
  EXPECT_TRUE(exists(t / "diffusion_pytorch_model.safetensors.index.json"));
  EXPECT_FALSE(exists(t / "diffusion_pytorch_model.safetensors"));
  auto r = SafetensorsReader::open(t.path());
  expect_same(r.tensors(), all_types());
  EXPECT_TRUE(has(r.file_of("t.bool"), "-00001-of-0000"));
  // Written as one file again: no old shard may remain.
  write_sharded_safetensors(t.path(), "diffusion_pytorch_model", all_types());
  EXPECT_EQ(1, std::distance(fs::directory_iterator(t.path()), fs::directory_iterator()));
  expect_same(SafetensorsReader::open(t.path()).tensors(), all_types());
}

TEST(ShardedSafetensors, IndexIsCheckedAgainstTheShards) {
  TemporaryFolder t;
  write_safetensors(t / "s.safetensors", {{"a", counting(DType::f32, {2})}, {"b", counting(DType::f32, {2})}});
  auto with_index = [&](const std::string& text) {
    std::ofstream(t / "model.safetensors.index.json") << text;
    return open_error(t.path());
  };
  EXPECT_EQ(with_index(R"({"weight_map":{"a":"s.safetensors","b":"s.safetensors"}})"), "no error");
  EXPECT_TRUE(
      has(with_index(R"({"weight_map":{"a":"gone.safetensors"}})"), "shard 'gone.safetensors', which is missing"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":"s.safetensors","c":"s.safetensors"}})"), "does not hold it"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":"s.safetensors"}})"), "holds 'b', which the index does not name"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":"../s.safetensors"}})"), "a file in the folder of the index"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":"/etc/passwd"}})"), "a file in the folder of the index"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":".."}})"), "a file in the folder of the index"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":3}})"), "not a file name"));
  EXPECT_TRUE(has(with_index(R"({"weight_map":{"a":"s.safetensors","a":"s.safetensors"}})"), "twice"));
  EXPECT_TRUE(has(with_index(R"({"metadata":{}})"), "no 'weight_map'"));
  EXPECT_TRUE(has(with_index("{"), "not JSON"));
}

TEST(SafetensorsReader, SaysWhatAFolderHoldsInstead) {
  TemporaryFolder t;
  EXPECT_TRUE(has(open_error(t.path()), "nothing"));
  std::ofstream(t / "diffusion_pytorch_model.bin").close();
  EXPECT_TRUE(has(open_error(t.path()), "convert it"));
  std::ofstream(t / "unet.safetensors").close();
  EXPECT_TRUE(has(open_error(t.path()), "try: the path of 'unet.safetensors' itself"));
  std::ofstream(t / "model_index.json").close();
  EXPECT_TRUE(has(open_error(t.path()), "whole pipeline"));
}

TEST(SafetensorsReader, TakesTheOnlyVariantOfAFolder) {
  TemporaryFolder t;
  write_safetensors(t / "model.fp16.safetensors", odd_shapes());
  expect_same(SafetensorsReader::open(t.path()).tensors(), odd_shapes());
  EXPECT_EQ(file_of_variant(t.path(), "fp16"), t / "model.fp16.safetensors");
  EXPECT_EQ(file_of_variant(t.path(), "fp8"), "");
  write_safetensors(t / "model.bf16.safetensors", all_types());
  EXPECT_TRUE(
      has(open_error(t.path()), "of the variants bf16, fp16 and no plain ones; expected one of them in variant="));
  write_safetensors(t / "model.safetensors", all_types());
  expect_same(SafetensorsReader::open(t.path()).tensors(), all_types());
  fs::remove(t / "model.safetensors");
  fs::remove(t / "model.bf16.safetensors");
  // With shards, the variant stands at the end of the index's name.
  fs::remove(t / "model.fp16.safetensors");
  write_sharded_safetensors(t.path(), "model.fp16", all_types(), 60);
  fs::rename(t / "model.fp16.safetensors.index.json", t / "model.safetensors.index.fp16.json");
  expect_same(SafetensorsReader::open(t.path()).tensors(), all_types());
  for (const char* name : {"model.fp16.safetensors", "model.safetensors.index.fp16.json",
                           "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"})
    EXPECT_TRUE(has_variant(name)) << name;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"})
    EXPECT_FALSE(has_variant(name)) << name;
}

TEST(SafetensorsReader, SaysHowToConvertAPickledFile) {
  TemporaryFolder t;
  for (const char* name : {"a.pth", "a.pt", "a.ckpt", "a.bin"}) {
    std::ofstream(t / name) << "PK";
    const std::string e = open_error(t / name);
    EXPECT_TRUE(has(e, "a pickled file")) << e;
    EXPECT_TRUE(has(e, "safetensors.torch.save_file(torch.load('" + t / name + "'")) << e;
  }
}

int writes_left = 0;
void full_disk(const std::string& path, size_t) {
  if (writes_left-- == 0) fail(Code::io, "write '{}': No space left on device", path);
}

TEST(SafetensorsWriter, LeavesWhatWasThereWhenAnyWriteFails) {
  TemporaryFolder t;
  write_safetensors(t / "a", odd_shapes());
  const std::string before = read_file(t / "a");
  int failures = 0;
  for (int k = 0;; ++k) {
    writes_left = k;
    set_write_hook(full_disk);
    std::string e = error_of([&] { write_safetensors(t / "a", all_types()); });
    set_write_hook(nullptr);
    if (e == "no error") break;
    ++failures;
    EXPECT_TRUE(has(e, t.path())) << e;
    // The last call is the fsync of the folder, after the rename: the new file may then exist, but must be whole.
    const bool renamed = read_file(t / "a") != before;
    if (renamed) expect_same(SafetensorsReader::open(t / "a").tensors(), all_types());
    EXPECT_EQ(1, std::distance(fs::directory_iterator(t.path()), fs::directory_iterator()))
        << "a temporary file stayed";
  }
  EXPECT_GE(failures, 15 + 2);
}

TEST(Safetensors, AreWrittenArrayByArray) {
  TemporaryFolder t;
  int held = 0, most = 0;
  ArraysToWrite arrays;
  HostArrays expected;
  for (int i = 0; i < 7; ++i) {
    const std::vector<float> values(1000, static_cast<float>(i));
    const Shape shape{DType::f32, {1000}};
    const std::string name = "a" + std::to_string(i);
    expected[name] = HostArray::of<float>(shape, values);
    arrays[name] = {shape, [&, values, shape] {
                      most = std::max(most, ++held);
                      std::shared_ptr<const void> owner(new std::vector<float>(values), [&held](const void* v) {
                        --held;
                        delete static_cast<const std::vector<float>*>(v);
                      });
                      return HostArray(shape, owner, static_cast<const std::vector<float>*>(owner.get())->data());
                    }};
  }
  write_sharded_safetensors(t.path(), "model", arrays, 8000);
  make_folders(t / "whole");
  write_sharded_safetensors(t / "whole", "model", expected, 8000);
  EXPECT_EQ(most, 1);
  EXPECT_EQ(held, 0);
  int files = 0;
  for (const auto& f : std::filesystem::directory_iterator(t / "whole")) {
    EXPECT_EQ(read_file(f.path()), read_file(t / f.path().filename().string()));
    ++files;
  }
  EXPECT_EQ(files, 5);
}

}  // namespace
}  // namespace md
