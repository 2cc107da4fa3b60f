#include "maxdiffusion/checkpoint/quantized_writers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/round_up.h"

namespace md {
namespace {

constexpr int64_t kAligned = 32, kFewNumbers = 1024;
constexpr float kLargestE4m3 = 448;

class GgufHeader {
 public:
  template <class T>
  void number(T v) {
    text_.append(reinterpret_cast<const char*>(&v), sizeof v);
  }
  void text(const std::string& s) {
    number(static_cast<uint64_t>(s.size()));
    text_ += s;
  }
  const std::string& bytes() const { return text_; }

 private:
  std::string text_;
};

struct GgufTensor {
  const std::string* name;
  const ArrayToWrite* array;
  const GgufType* type;
  Dims dims;  // as written
  int64_t bytes;
};

const GgufType& type_of(const std::string& path, const std::string& name, const Shape& s, const GgufType* requested) {
  const GgufType* same_type = gguf_type_of(s.dtype);
  const bool unchanged = !requested || !is_float(s.dtype);
  check(!unchanged || same_type, Code::invalid_config,
        "write '{}': '{}' is {}, which GGUF has no type for; expected a dtype", path, name, to_string(s.dtype));
  if (unchanged) return *same_type;
  if (s.dims.size() <= 1 || s.elements() <= kFewNumbers) return *gguf_type_of(DType::f32);
  if (s.dims.size() > 2 || s.dims.back() % requested->numbers != 0) return *gguf_type_of(DType::f16);
  return *requested;
}

HostArray gguf_bytes(const GgufTensor& t) {
  const HostArray values = t.array->make();
  if (t.type->plain) {
    HostArray out = values.cast(t.type->dtype);
    if (out.owner() != values.owner()) release_pages(values.data(), values.bytes());
    return out;
  }
  const HostArray numbers = values.cast(DType::f32);
  if (numbers.owner() != values.owner()) release_pages(values.data(), values.bytes());
  HostArray out({DType::u8, {t.bytes}});
  write_gguf_blocks(*t.type, numbers.view<float>().data(), numbers.shape().elements() / t.type->numbers,
                    out.mutable_data());
  release_pages(numbers.data(), numbers.bytes());
  return out;
}

void write_gguf_file(const std::string& path, const std::vector<GgufTensor>& all, const std::string& architecture) {
  constexpr uint32_t kVersion = 3, kText = 8, kUnsigned = 4, kQuantizationVersion = 2;
  GgufHeader h;
  h.number(kVersion);
  h.number(static_cast<uint64_t>(all.size()));
  h.number(uint64_t{2});
  h.text("general.architecture");
  h.number(kText);
  h.text(architecture);
  h.text("general.quantization_version");
  h.number(kUnsigned);
  h.number(kQuantizationVersion);
  int64_t at = 0;
  for (const GgufTensor& t : all) {
    h.text(*t.name);
    h.number(static_cast<uint32_t>(t.dims.size()));
    for (auto n = t.dims.rbegin(); n != t.dims.rend(); ++n) h.number(static_cast<uint64_t>(*n));
    h.number(t.type->id);
    h.number(static_cast<uint64_t>(at));
    at = round_up(at + t.bytes, kAligned);
  }
  FileWriter w(path);
  const std::string zeros(static_cast<size_t>(kAligned), '\0');
  const auto pad = [&](int64_t written) {
    w.write(zeros.data(), static_cast<size_t>(round_up(written, kAligned) - written));
  };
  w.write("GGUF", 4);
  w.write(h.bytes().data(), h.bytes().size());
  pad(4 + std::ssize(h.bytes()));
  for (const GgufTensor& t : all) {
    const HostArray bytes = gguf_bytes(t);
    check(std::ssize(std::span(bytes.data(), bytes.bytes())) == t.bytes, Code::internal,
          "write '{}': tensor '{}' has {} bytes; expected {}", path, *t.name, bytes.bytes(), t.bytes);
    w.write(bytes.data(), bytes.bytes());
    pad(t.bytes);
  }
  w.close();
}

bool becomes_float8(const std::string& name, const Shape& s) {
  if (!name.ends_with(".weight") || s.dims.size() != 2 || !is_float(s.dtype) || size_of(s.dtype) == 1) return false;
  return std::ranges::none_of(std::vector{"embedding.", "embeddings.", "embed_tokens.", "token_embd.", "shared."},
                              [&](const char* part) { return name.find(part) != std::string::npos; });
}

/// The largest magnitude divided by the largest float8, so that it becomes the largest float8; 1 if all are zero.
float scale_of(const HostArray& numbers) {
  float most = 0;
  for (const float v : numbers.view<float>()) most = std::max(most, std::fabs(v));
  return most > 0 ? most / kLargestE4m3 : 1;
}

}  // namespace

void write_gguf(const std::string& path, const ArraysToWrite& tensors, const GgufType* type,
                const std::string& architecture) {
  std::vector<GgufTensor> all;
  for (const auto& [name, array] : tensors) {
    GgufTensor t{&name, &array, &type_of(path, name, array.shape, type), array.shape.dims, 0};
    if (t.dims.empty()) t.dims = {1};
    t.bytes = array.shape.elements() / t.type->numbers * t.type->bytes;
    all.push_back(std::move(t));
  }
  const WholeFile whole;
  replace_file(path, [&](const std::string& temporary) { write_gguf_file(temporary, all, architecture); });
}

ArraysToWrite with_scaled_float8(const ArraysToWrite& tensors, const std::string& prefix) {
  ArraysToWrite out;
  for (const auto& [name, array] : tensors) {
    if (!becomes_float8(name, array.shape)) {
      out[name] = array;
      continue;
    }
    const auto numbers = [make = array.make] {
      const HostArray values = make();
      HostArray f32 = values.cast(DType::f32);
      if (f32.owner() != values.owner()) release_pages(values.data(), values.bytes());
      return f32;
    };
    out[name] = {{DType::f8e4m3fn, array.shape.dims}, [numbers] {
                   HostArray v = numbers();
                   const float scale = scale_of(v);
                   HostArray scaled(v.shape());
                   const auto y = scaled.mutable_view<float>();
                   const auto x = v.view<float>();
                   for (size_t i = 0; i < y.size(); ++i) y[i] = x[i] / scale;
                   return scaled.cast(DType::f8e4m3fn);
                 }};
    out[name.substr(0, name.rfind('.')) + ".scale_weight"] = {
        {DType::f32, {}}, [numbers] {
          const float scale = scale_of(numbers());
          return HostArray::of<float>({DType::f32, {}}, {&scale, 1});
        }};
  }
  // ComfyUI reads the size of this tensor: with two elements, products are computed in the layers' type.
  const std::vector<uint8_t> mark(2, 0);
  out[prefix + "scaled_fp8"] = {{DType::f8e4m3fn, {2}}, [mark] {
                                  return HostArray::of<uint8_t>({DType::f8e4m3fn, {2}}, mark);
                                }};
  return out;
}

}  // namespace md
