#include "maxdiffusion/checkpoint/weight_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/gguf.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"

namespace md {
namespace {

const std::string kFiles = MD_SOURCE_DIR "/tests/golden/quantized_files/";

/// Overwrites bytes of a header at an offset, or after a text in it.
class Bytes {
 public:
  Bytes() : text(read_file(kFiles + "types.gguf")) {}
  template <class T>
  Bytes& set(size_t at, T value) {
    std::memcpy(text.data() + at, &value, sizeof value);
    return *this;
  }
  size_t behind(const std::string& part, size_t extra = 0) const { return text.find(part) + part.size() + extra; }
  std::string text;
};

std::string error_of(const std::string& path, const std::vector<WantedWeight>& expected,
                     const LoadOptions& options = {}) {
  try {
    load_weights(path, expected, options);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}
std::string gguf_error(const std::string& bytes) {
  const TemporaryFolder t;
  write_file_atomic(t / "a.gguf", bytes);
  try {
    SafetensorsReader::open(t / "a.gguf");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
  return "no error";
}
bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(WeightFormat, EveryTypeOfGgufIsReadAsThePublishedPackageReadsIt) {
  const HostArrays values = SafetensorsReader::open(kFiles + "types.safetensors").tensors();
  std::vector<WantedWeight> expected;
  for (const auto& [name, array] : values) expected.push_back({name, array.shape()});
  ASSERT_EQ(expected.size(), 19u);
  const HostArrays read = load_weights(kFiles + "types.gguf", expected);
  for (const auto& [name, array] : values) {
    const auto want = array.view<float>(), got = read.at(name).view<float>();
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_LE(std::fabs(got[i] - want[i]), 1e-6 * std::fabs(want[i]) + 1e-6) << name << " " << i;
  }
  const SafetensorsReader file = SafetensorsReader::open(kFiles + "types.gguf");
  EXPECT_EQ(file.metadata().at("general.architecture"), "flux");
  EXPECT_EQ(file.metadata().at("a.number"), "7");
  EXPECT_FALSE(file.metadata().contains("a.list"));
}

TEST(WeightFormat, GgufOfVersion2IsReadAndOthersAreRefused) {
  EXPECT_EQ(gguf_error(Bytes().set<uint32_t>(4, 2).text), "no error");
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(4, 1).text), "GGUF of version 1; expected 2 or 3"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(4, 3 << 24).text), "big-endian"));
}

TEST(WeightFormat, HostileGgufIsRefusedByName) {
  const Bytes whole;
  const size_t entry = whole.behind("q4_0.weight");  // rank, sizes, type, offset
  for (size_t n = 0; n < whole.text.size(); n += 61) {
    const std::string e = gguf_error(whole.text.substr(0, n));
    if (!says(e, "truncated")) {
      EXPECT_TRUE(says(e, "are more than a file of")) << n << " " << e;
    }
  }
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(8, 1ULL << 60).text), "tensors are more than a file of"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(16, 1ULL << 60).text), "values are more than a file of"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(24, 1ULL << 60).text), "truncated: a key of"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(entry, 99).text), "tensor 'q4_0.weight' has 99 axes"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(entry + 4, 1ULL << 62).text), "do not fit into memory"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(entry + 4, 63).text), "rows of 63 numbers are not whole blocks"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(entry + 12, 1 << 20).text), "truncated: tensor 'q4_0.weight'"));
  // A type or version that is not known is no damage.
  for (const std::string& text :
       {gguf_error(Bytes().set<uint32_t>(entry + 20, 40).text), gguf_error(Bytes().set<uint32_t>(4, 1).text)})
    EXPECT_FALSE(says(text, "damaged")) << text;
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(entry + 20, 40).text),
                   "is of ggml's type 40, which is not supported; expected one of: "));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(entry + 20, 16).text),
                   "is IQ2_XXS, which is not supported; expected one of: F32, F16, Q4_0"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(entry + 24, 8).text), "which is not a multiple of 32"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint64_t>(entry + 24, 128).text), "overlaps"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<char>(whole.text.find("q4_1.weight") + 3, '0').text), "'q4_0.weight' twice"));
  EXPECT_TRUE(says(gguf_error(Bytes().set<uint32_t>(whole.behind("orig_shape.flat.weight", 16), 5).text),
                   "comfy.gguf.orig_shape.flat.weight is ["));
}

TEST(WeightFormat, Bitsandbytes4BitsAndInt8AreReadAsThePackageReadsThem) {
  const HostArrays values = SafetensorsReader::open(kFiles + "bnb_values.safetensors").tensors();
  std::vector<WantedWeight> expected;
  for (const char* name : {"nested", "plain", "fp4", "int8"})
    expected.push_back({std::string(name) + ".weight", values.at(name).shape()});
  const HostArrays read = load_weights(kFiles + "bnb.safetensors", expected);
  for (const char* name : {"nested", "plain", "fp4", "int8"}) {
    const auto want = values.at(std::string(name) + ".read").view<float>(),
               got = read.at(std::string(name) + ".weight").view<float>();
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-7) << name << " " << i;
  }
}

TEST(WeightFormat, DamagedBitsandbytesStatesAreNamed) {
  const TemporaryFolder t;
  const HostArrays whole = SafetensorsReader::open(kFiles + "bnb.safetensors").tensors();
  const auto error = [&](const std::string& name, const std::function<void(HostArrays&)>& damage) {
    HostArrays all;
    for (const auto& [key, array] : whole)
      if (key.starts_with(name)) all[key] = array;
    damage(all);
    write_safetensors(t / "a.safetensors", all);
    return error_of(t / "a.safetensors", {{name + ".weight", {DType::f32, {96, 192}}}});
  };
  const std::string state = "nested.weight.quant_state.bitsandbytes__nf4";
  EXPECT_EQ(error("nested", [](HostArrays&) {}), "no error");
  EXPECT_TRUE(says(error("nested", [](HostArrays& a) { a.erase("nested.weight.absmax"); }),
                   "'nested.weight' is in 4 bits and has no 'nested.weight.absmax'"));
  EXPECT_TRUE(says(error("nested", [](HostArrays& a) { a.erase("nested.weight.nested_absmax"); }), "expected both"));
  EXPECT_TRUE(says(error("nested",
                         [&](HostArrays& a) {
                           a[state] = HostArray::of<char>({DType::u8, {2}}, {{'{', '}'}});
                         }),
                   "its quant_state is not what bitsandbytes writes"));
  EXPECT_TRUE(says(error("nested",
                         [&](HostArrays& a) {
                           std::string text(reinterpret_cast<const char*>(a[state].data()), a[state].bytes());
                           text.replace(text.find("192"), 3, "194");
                           a[state] = HostArray::of<char>({DType::u8, {std::ssize(text)}}, text);
                         }),
                   "'nested.weight': 9216 bytes and 288 blocks do not fit its quant_state"));
  EXPECT_TRUE(says(error("int8",
                         [](HostArrays& a) {
                           a.at("int8.SCB") = a.at("int8.SCB").reshaped({1, 6});
                         }),
                   "1 of another shape"));
}

TEST(WeightFormat, AFloat8WeightWithoutItsScaleIsAnErrorInAFileWithScalesAndPlainElsewhere) {
  const TemporaryFolder t;
  const std::vector<float> numbers{1, -2, 4, 0.5F};
  const HostArray w = HostArray::of<float>({DType::f32, {2, 2}}, numbers).cast(DType::f8e4m3fn);
  const HostArray scale = HostArray::of<float>({DType::f32, {}}, {{3.0F}});
  const std::string path = t / "a.safetensors";
  const std::vector<WantedWeight> expected{{"a.weight", {DType::f32, {2, 2}}}, {"b.weight", {DType::f32, {2, 2}}}};
  write_safetensors(path, {{"a.weight", w}, {"b.weight", w}});
  EXPECT_EQ(load_weights(path, expected).at("a.weight").to_doubles(), (std::vector<double>{1, -2, 4, 0.5}));
  write_safetensors(path, {{"a.weight", w}, {"b.weight", w}, {"a.scale_weight", scale}, {"b.scale_weight", scale}});
  EXPECT_EQ(load_weights(path, expected).at("b.weight").to_doubles(), (std::vector<double>{3, -6, 12, 1.5}));
  const HostArray of_rows = HostArray::of<float>({DType::f32, {2}}, {{3.0F, 5.0F}});
  write_safetensors(path, {{"a.weight", w}, {"b.weight", w}, {"a.weight_scale", scale}, {"b.weight_scale", of_rows}});
  EXPECT_EQ(load_weights(path, expected).at("b.weight").to_doubles(), (std::vector<double>{3, -6, 20, 2.5}));
  const HostArray of_columns = HostArray::of<float>({DType::f32, {1, 2}}, {{3.0F, 5.0F}});
  write_safetensors(path,
                    {{"a.weight", w}, {"b.weight", w}, {"a.weight_scale", scale}, {"b.weight_scale", of_columns}});
  EXPECT_TRUE(
      says(error_of(path, expected), "'b.weight' is f8e4m3fn[2,2] and its scale f32[1,2]; expected one number"));
  write_safetensors(path, {{"a.weight", w}, {"b.weight", w}, {"a.scale_weight", scale}});
  EXPECT_TRUE(
      says(error_of(path, expected), "'b.weight' is f8e4m3fn without a scale, but the file holds 'a.scale_weight'"));
  write_safetensors(path, {{"a.weight", w}, {"b.weight", w}, {"scaled_fp8", scale}});
  EXPECT_TRUE(
      says(error_of(path, expected), "'a.weight' is f8e4m3fn without a scale, but the file holds 'scaled_fp8'"));
}

TEST(WeightFormat, MarksThatSayMoreThanScalesAreRefusedByName) {
  const TemporaryFolder t;
  const std::string path = t / "a.safetensors";
  const std::vector<WantedWeight> expected{{"a.weight", {DType::f32, {2, 2}}}};
  const HostArray int8 = HostArray::of<int8_t>({DType::s8, {2, 2}}, {{1, -2, 4, 5}}),
                  float8 = HostArray::of<float>({DType::f32, {2, 2}}, {{1, -2, 4, 0.5F}}).cast(DType::f8e4m3fn),
                  rows = HostArray::of<float>({DType::f32, {2, 1}}, {{3, 0.5F}});
  const auto write = [&](const HostArray& weight, const std::string& mark, bool in_header) {
    HostArrays file{{"a.weight", weight}, {"a.weight_scale", rows}};
    const std::vector<uint8_t> bytes(mark.begin(), mark.end());
    if (!in_header)
      file["a.comfy_quant"] = HostArray::of<uint8_t>({DType::u8, {static_cast<int64_t>(bytes.size())}}, bytes);
    std::map<std::string, std::string> metadata;
    if (in_header) metadata["_quantization_metadata"] = R"({"format_version": "1.0", "layers": {"a": )" + mark + "}}";
    write_safetensors(path, file, metadata);
  };
  for (const bool in_header : {false, true}) {
    for (const char* mark :
         {R"({"format": "int8_tensorwise"})", R"({"per_row": true})",
          R"({"format": "int8_tensorwise", "params": {"convrot": false, "convrot_groupsize": 256}})"}) {
      write(int8, mark, in_header);
      EXPECT_EQ(load_weights(path, expected).at("a.weight").to_doubles(), (std::vector<double>{3, -6, 2, 2.5})) << mark;
    }
    write(float8, R"({"format": "float8_e4m3fn", "full_precision_matrix_mult": true})", in_header);
    EXPECT_EQ(load_weights(path, expected).at("a.weight").to_doubles(), (std::vector<double>{3, -6, 2, 0.25}));
    for (const auto& [mark, says_what] : {
             std::pair(R"({"format": "int8_tensorwise", "convrot": true})", "rotated weights (convrot)"),
             std::pair(R"({"convrot": true, "convrot_groupsize": 256, "per_row": true})", "rotated weights (convrot)"),
             std::pair(R"({"format": "int8_tensorwise", "params": {"convrot": true}})", "rotated weights (convrot)"),
             std::pair(R"({"format": "nvfp4"})", "format \"nvfp4\""),
             std::pair(R"({"format": "float8_e4m3fn"})", "format \"float8_e4m3fn\" of a tensor that is s8"),
             std::pair(R"({"format": "int8_tensorwise", "shift": 1})", "field 'shift'"),
             std::pair("[1]", "not a JSON object"),
         }) {
      write(int8, mark, in_header);
      const std::string error = error_of(path, expected);
      EXPECT_TRUE(says(error, "a.comfy_quant") && says(error, says_what)) << mark << error;
    }
  }
}

TEST(WeightFormat, WhatStandsNextToAWeightOf8BitsIsUnderstoodOrRefused) {
  const TemporaryFolder t;
  const std::string path = t / "a.safetensors";
  const std::vector<WantedWeight> expected{{"a.weight", {DType::f32, {2, 2}}}};
  const HostArray int8 = HostArray::of<int8_t>({DType::s8, {2, 2}}, {{1, -2, 4, 5}}),
                  float8 = HostArray::of<float>({DType::f32, {2, 2}}, {{1, -2, 4, 0.5F}}).cast(DType::f8e4m3fn),
                  one = HostArray::of<float>({DType::f32, {1, 1}}, {{3}}),
                  rows = HostArray::of<float>({DType::f32, {2}}, {{127, 254}});
  const auto error = [&](const HostArrays& file) {
    write_safetensors(path, file);
    return error_of(path, expected, {.allow_unused = true});
  };
  // Scales of blocks (transformers' fp8), zero points, optimum-quanto's names.
  for (const char* name : {"a.weight_scale_inv", "a.weight_zero_point", "a.weight._scale", "a.smooth_factor"})
    for (const HostArray& weight : {float8, int8}) {
      const std::string message = error({{"a.weight", weight}, {name, one}});
      EXPECT_TRUE(says(message, fmt::format("'{}' next to it is not understood", name))) << message;
    }
  write_safetensors(path, {{"a.weight", float8}, {"a.bias", rows}, {"a.b.c", one}, {"a.input_scale", one}});
  EXPECT_EQ(load_weights(path, expected, {.allow_unused = true}).at("a.weight").to_doubles(),
            (std::vector<double>{1, -2, 4, 0.5}));
  // A mark of a module whose weight has another name.
  const std::string mark = R"({"format": "nvfp4"})";
  const std::string lone = error({{"a.weight", float8.cast(DType::f32)},
                                  {"b.comfy_quant", HostArray::of<char>({DType::u8, {std::ssize(mark)}}, mark)},
                                  {"b.in_proj_weight", float8}});
  EXPECT_TRUE(says(lone, "'b.comfy_quant' marks quantized weights, but the file holds no 'b.weight'")) << lone;
  // bitsandbytes' order of int8: rows, or blocks of several GPUs.
  const auto ordered = [&](uint8_t order) {
    return HostArrays{
        {"a.weight", int8}, {"a.SCB", rows}, {"a.weight_format", HostArray::of<uint8_t>({DType::u8, {}}, {{order}})}};
  };
  write_safetensors(path, ordered(0));
  const std::vector<double> values = load_weights(path, expected).at("a.weight").to_doubles();
  for (size_t i = 0; i < 4; ++i)
    EXPECT_NEAR(values[i], (std::vector<double>{1, -2, 8, 10})[i], 1e-6) << "SCB / 127 is 1 and 2";
  EXPECT_TRUE(says(error(ordered(2)), "'a.weight_format' is 2: 'a.weight' is not in the order of rows"));
}

TEST(WeightFormat, BlocksAreWrittenWithTheBytesOfThePublishedPackage) {
  const HostArrays golden = SafetensorsReader::open(kFiles + "written.safetensors").tensors();
  const HostArray& x = golden.at("x");
  for (const char* name : {"q8_0", "q4_0"}) {
    const GgufType* type = find_written_gguf_type(name);
    ASSERT_TRUE(type) << name;
    const HostArray& want = golden.at(std::string("x.") + name);
    std::vector<std::byte> got(want.bytes());
    write_gguf_blocks(*type, x.view<float>().data(), x.shape().elements() / type->numbers, got.data());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], want.data()[i]) << name << " byte " << i;
  }
  EXPECT_EQ(find_written_gguf_type("q4_k"), nullptr);
}

}  // namespace
}  // namespace md
