#include "maxdiffusion/checkpoint/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/gguf.h"

namespace md {
namespace {

std::string module_of(const std::string& tensor) { return tensor.substr(0, tensor.rfind('.')); }

// 8-bit numbers with scales: values · scale, with one scale for the tensor or for each row. ComfyUI names it
// MODULE.scale_weight, Black Forest Labs' files and others MODULE.weight_scale. Source: diffusers, quantizers/bfl
// (dequantize_fp8r).

constexpr std::array kScales = {".scale_weight", ".weight_scale"};

bool is_scale(const std::string& tensor) {
  return tensor == "scaled_fp8" || tensor.ends_with(".scaled_fp8") ||
         std::ranges::any_of(kScales, [&](const char* end) { return tensor.ends_with(end); });
}

// ComfyUI's mark of a quantized module: MODULE.comfy_quant, bytes of a JSON object. Source: ComfyUI, comfy/ops.py and
// QUANTIZATION.md.

constexpr char kMark[] = ".comfy_quant";
/// Fields that do not change what a matrix's weights are.
constexpr std::array kNotOfWeights = {"full_precision_matrix_mult", "per_row", "orig_dtype", "linear_dtype",
                                      "num_experts"};

/// Throws invalid_config naming the mark where it says more than that values are multiplied by their scales.
void check_mark(const HostArrays& file, const std::string& tensor) {
  const auto found = file.find(module_of(tensor) + kMark);
  if (found == file.end() || !tensor.ends_with(".weight")) return;
  const auto& [name, bytes] = *found;
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.bytes());
  const auto refuse = [&, &name = name](const std::string& what) {
    throw Error(Code::invalid_config, fmt::format("'{}' is {}: {}, which is not supported", name, text, what))
        .note("expected scaled float8 or int8 with one scale for the tensor or for each row, without rotation")
        .note("try: a file of the same model in bfloat16, float16, scaled float8_e4m3fn or GGUF");
  };
  const nlohmann::json mark = bytes.dtype() == DType::u8 ? parse_json_or_discard(text) : nlohmann::json();
  if (!mark.is_object()) refuse("not a JSON object");
  const auto check_fields = [&](const nlohmann::json& fields) {
    for (const auto& [field, value] : fields.items()) {
      if (field == "format") {
        const bool is_int8 = value == "int8_tensorwise", is_float8 = value == "float8_e4m3fn" || value == "float8_e5m2";
        const DType type = file.at(tensor).dtype();
        if (!is_int8 && !is_float8) refuse(fmt::format("format {}", value.dump()));
        if (is_int8 ? type != DType::s8 : size_of(type) != 1 || !is_float(type))
          refuse(fmt::format("format {} of a tensor that is {}", value.dump(), to_string(type)));
      } else if (field == "convrot" || field == "convrot_groupsize") {
        if (field == "convrot" && value != false) refuse("rotated weights (convrot)");
      } else if (field != "params" && std::ranges::find(kNotOfWeights, field) == kNotOfWeights.end()) {
        refuse(fmt::format("field '{}'", field));
      }
    }
  };
  check_fields(mark);
  if (const auto params = mark.find("params"); params != mark.end()) {
    if (!params->is_object()) refuse("field 'params'");
    check_fields(*params);
  }
}

bool is_scale_extra(const std::string& tensor) {
  return tensor.ends_with(".scale_input") || tensor.ends_with(".input_scale") || tensor.ends_with(kMark) ||
         tensor == "scaled_fp8" || tensor.ends_with(".scaled_fp8");
}

/// Throws invalid_config for a tensor of the same module that may change what a weight in 8 bits means.
void check_neighbours(const HostArrays& file, const std::string& tensor) {
  const std::string beginning = module_of(tensor) + ".";
  for (auto it = file.lower_bound(beginning); it != file.end() && it->first.starts_with(beginning); ++it) {
    const std::string& name = it->first;
    const std::string rest = name.substr(beginning.size());
    const bool nested = rest.find('.') != rest.npos && !rest.starts_with("weight.");  // of another module
    if (nested || name == tensor || rest == "bias" || is_scale(name) || is_scale_extra(name)) continue;
    throw Error(Code::invalid_config, fmt::format("'{}' is {}, and '{}' next to it is not understood", tensor,
                                                  to_string(file.at(tensor).dtype()), name))
        .note("expected scaled float8 or int8: one scale for the tensor or for each row, and nothing else")
        .note("try: a file of the same model in bfloat16, float16, scaled float8_e4m3fn or GGUF");
  }
}

std::optional<std::vector<std::string>> scale_beside(const HostArrays& file, const std::string& tensor) {
  const DType type = file.at(tensor).dtype();
  if (size_of(type) > 1 || !tensor.ends_with(".weight")) return std::nullopt;
  const std::string module = module_of(tensor);
  check(!file.contains(module + ".weight_scale_2"), Code::invalid_config,
        "'{}' holds {} in blocks of 16 with two scales (nvfp4), which is not supported; expected a file of the same "
        "model "
        "in bfloat16, float16 or scaled float8_e4m3fn",
        tensor, to_string(type));
  check_neighbours(file, tensor);
  for (const char* scale : kScales)
    if (file.contains(module + scale)) return std::vector{module + scale};
  if (!is_float(type)) return std::nullopt;
  const auto other = std::ranges::find_if(file, [](const auto& item) { return is_scale(item.first); });
  check(
      other == file.end(), Code::io,
      "'{}' is {} without a scale, but the file holds '{}'; expected '{}.scale_weight' or '{}.weight_scale', or a file "
      "without any scales",
      tensor, to_string(type), other == file.end() ? "" : other->first, module, module);
  return std::nullopt;
}

HostArray times_scale(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  const HostArray &scale = companions.at(0), factors = scale.cast(DType::f32);
  const int64_t count = scale.shape().elements(), rows = values.dims().empty() ? 1 : values.dims()[0];
  const bool of_rows = count == rows && (scale.dims().size() < 2 || scale.dims()[0] == rows);  // not of columns
  check(is_float(scale.dtype()) && (count == 1 || of_rows), Code::io,
        "'{}' is {} and its scale {}; expected one number, or one for each of {} rows", tensor,
        to_string(values.shape()), to_string(scale.shape()), rows);
  HostArray out = values.cast(DType::f32);
  const auto y = out.mutable_view<float>();
  const auto s = factors.view<float>();
  const size_t row = y.size() / static_cast<size_t>(std::max<int64_t>(rows, 1));
  for (size_t i = 0; i < y.size(); ++i) y[i] *= s[count == 1 ? 0 : i / row];
  return out;
}

// Blocks of GGUF files (gguf.h).

std::optional<std::vector<std::string>> packing_beside(const HostArrays& file, const std::string& tensor) {
  if (!file.contains(packing_of(tensor))) return std::nullopt;
  return std::vector{packing_of(tensor)};
}

GgufPacking checked_packing(const HostArray& values, const HostArray& packing, const std::string& tensor) {
  GgufPacking p;
  if (packing.dtype() == DType::s64 && packing.shape().elements() >= 1) p = read_packing(packing);
  int64_t numbers = 1;
  bool fits = p.type && p.type->read && !p.dims.empty();
  for (const int64_t n : p.dims) fits = fits && n >= 0 && !__builtin_mul_overflow(numbers, n, &numbers);
  check(fits && numbers % p.type->numbers == 0 &&
            static_cast<uint64_t>(numbers / p.type->numbers) * static_cast<uint64_t>(p.type->bytes) == values.bytes(),
        Code::io, "'{}' is {}, which its '{}' does not fit", tensor, to_string(values.shape()), packing_of(tensor));
  return p;
}

Dims gguf_dims(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  return checked_packing(values, companions.at(0), tensor).dims;
}

HostArray from_gguf(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  const GgufPacking p = checked_packing(values, companions.at(0), tensor);
  HostArray out({DType::f32, p.dims});
  read_gguf_blocks(*p.type, values.data(), out.shape().elements() / p.type->numbers, out.mutable_view<float>().data());
  return out;
}

// bitsandbytes' 4-bit formats: indices into a table of 16 values, two per byte, the first in the high nibble, times the
// largest magnitude of their block. These magnitudes may be quantized to 8 bits: indices into a table of 256 values,
// times the largest magnitude of their block, plus an offset. Source: bitsandbytes, functional.py (QuantState's
// state_dict).

constexpr std::array kStates = {".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"};
constexpr std::array kTables = {".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"};

std::optional<std::vector<std::string>> state_beside(const HostArrays& file, const std::string& tensor) {
  for (const char* state : kStates) {
    if (!file.contains(tensor + state)) continue;
    std::vector<std::string> names{tensor + state};
    for (const char* table : kTables)
      if (file.contains(tensor + table))
        names.push_back(tensor + table);
      else
        check(std::string_view(table).starts_with(".nested"), Code::io, "'{}' is in 4 bits and has no '{}{}'", tensor,
              tensor, table);
    check(names.size() == 3 || names.size() == 5, Code::io,
          "'{0}' has one of '{0}.nested_absmax' and '{0}.nested_quant_map'; expected both or none", tensor);
    return names;
  }
  return std::nullopt;
}

struct FourBits {
  Dims dims;
  int64_t block = 0, nested_block = 0;
  float offset = 0;
};

FourBits four_bits(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  const HostArray& text = companions.at(0);
  FourBits s;
  try {
    check(text.dtype() == DType::u8, Code::io, "not bytes");
    const nlohmann::json j = parse_json(std::string(reinterpret_cast<const char*>(text.data()), text.bytes()));
    s.dims = j.at("shape").get<Dims>();
    s.block = j.at("blocksize").get<int64_t>();
    if (companions.size() == 5) {
      s.nested_block = j.at("nested_blocksize").get<int64_t>();
      s.offset = j.at("nested_offset").get<float>();
    }
  } catch (const std::exception& e) {
    fail(Code::io, "'{}': its quant_state is not what bitsandbytes writes: {}", tensor, e.what());
  }
  const bool nested = companions.size() == 5;
  const HostArray &largest = companions.at(1), &table = companions.at(2);
  int64_t numbers = 1;
  bool fits = s.block > 0 && (!nested || s.nested_block > 0) && !s.dims.empty();
  for (const int64_t n : s.dims) fits = fits && n > 0 && !__builtin_mul_overflow(numbers, n, &numbers);
  const auto blocks_of = [](int64_t n, int64_t block) { return n / block + (n % block != 0); };
  fits = fits && numbers < INT64_MAX / 2 && values.bytes() == static_cast<size_t>((numbers + 1) / 2) &&
         size_of(values.dtype()) == 1 && largest.shape().elements() == blocks_of(numbers, s.block) &&
         largest.dtype() == (nested ? DType::u8 : DType::f32) && table.dtype() == DType::f32 &&
         table.shape().elements() == 16;
  if (fits && nested)
    fits = companions.at(3).dtype() == DType::f32 && companions.at(4).dtype() == DType::f32 &&
           companions.at(3).shape().elements() == blocks_of(largest.shape().elements(), s.nested_block) &&
           companions.at(4).shape().elements() == 256;
  check(fits, Code::io, "'{}': {} bytes and {} blocks do not fit its quant_state: shape {}, blocksize {}", tensor,
        values.bytes(), largest.shape().elements(), to_string(s.dims), s.block);
  return s;
}

Dims four_bit_dims(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  return four_bits(values, companions, tensor).dims;
}

HostArray from_four_bits(const HostArray& values, const std::vector<HostArray>& companions, const std::string& tensor) {
  const FourBits s = four_bits(values, companions, tensor);
  std::vector<float> largest(static_cast<size_t>(companions.at(1).shape().elements()));
  if (companions.size() == 5) {
    const auto of = companions[3].view<float>(), map = companions[4].view<float>();
    const auto code = companions[1].view<uint8_t>();
    for (size_t i = 0; i < largest.size(); ++i)
      largest[i] = map[code[i]] * of[i / static_cast<size_t>(s.nested_block)] + s.offset;
  } else {
    std::ranges::copy(companions[1].view<float>(), largest.begin());
  }
  const auto map = companions[2].view<float>();
  HostArray out({DType::f32, s.dims});
  const auto y = out.mutable_view<float>();
  const auto block = static_cast<size_t>(s.block);
  const std::byte* q = values.data();
  for (size_t i = 0; i < y.size(); ++i) {
    const auto byte = std::to_integer<size_t>(q[i / 2]);
    y[i] = map[i % 2 == 0 ? byte >> 4 : byte & 15] * largest[i / block];
  }
  return out;
}

bool is_state(const std::string& tensor) {
  const auto ends = [&](const char* end) { return tensor.ends_with(end); };
  return std::ranges::any_of(kStates, ends) || std::ranges::any_of(kTables, ends);
}

// bitsandbytes' int8 format: values · SCB / 127, with one SCB for each row. Source: bitsandbytes, nn/modules.py
// (Int8Params) and functional.py (int8_vectorwise_dequant).

constexpr char kInt8Order[] = ".weight_format";  // 0: row after row; others: blocks of several GPUs

std::optional<std::vector<std::string>> row_scales_beside(const HostArrays& file, const std::string& tensor) {
  const std::string scales = module_of(tensor) + ".SCB";
  if (file.at(tensor).dtype() != DType::s8 || !tensor.ends_with(".weight") || !file.contains(scales))
    return std::nullopt;
  if (const auto order = file.find(module_of(tensor) + kInt8Order); order != file.end())
    check(order->second.shape().elements() == 1 && order->second.to_doubles()[0] == 0, Code::invalid_config,
          "'{}' is {}: '{}' is not in the order of rows, which is not supported; expected one 0", order->first,
          order->second.shape().elements() == 1 ? fmt::format("{}", order->second.to_doubles()[0])
                                                : to_string(order->second.shape()),
          tensor);
  return std::vector{scales};
}

bool is_int8_mark(const std::string& tensor) { return tensor.ends_with(kInt8Order); }

HostArray times_row_scale(const HostArray& values, const std::vector<HostArray>& companions,
                          const std::string& tensor) {
  const HostArray& scale = companions.at(0);
  const int64_t rows = values.dims().empty() ? 0 : values.dims()[0];
  check(scale.dtype() == DType::f32 && scale.shape().elements() == rows, Code::io,
        "'{}' is {} and its SCB {}; expected one number of f32 for each of {} rows", tensor, to_string(values.shape()),
        to_string(scale.shape()), rows);
  HostArray out = values.cast(DType::f32);
  const auto y = out.mutable_view<float>();
  const auto s = scale.view<float>();
  const size_t row = y.size() / static_cast<size_t>(std::max<int64_t>(rows, 1));
  constexpr float kOfOne = 1.0F / 127;
  for (size_t i = 0; i < y.size(); ++i) y[i] *= s[i / row] * kOfOne;
  return out;
}

// The first format that matches a tensor reads it.
constexpr WeightFormat kFormats[] = {
    {"GGUF", packing_beside, gguf_dims, is_packing, from_gguf},
    {"bitsandbytes' 4 bits", state_beside, four_bit_dims, is_state, from_four_bits},
    {"bitsandbytes' int8", row_scales_beside, nullptr, is_int8_mark, times_row_scale},
    {"scaled float8", scale_beside, nullptr, is_scale_extra, times_scale},
};

}  // namespace

FoundFormat format_of(const HostArrays& file, const std::string& tensor) {
  check_mark(file, tensor);
  for (const WeightFormat& f : kFormats)
    if (auto companions = f.companions(file, tensor)) return {&f, std::move(*companions)};
  return {};
}

void check_marks(const HostArrays& file) {
  for (const auto& [name, bytes] : file)
    check(!name.ends_with(kMark) || file.contains(module_of(name) + ".weight"), Code::invalid_config,
          "'{}' marks quantized weights, but the file holds no '{}.weight'; expected a weight next to each mark", name,
          module_of(name));
}

bool is_format_extra(const std::string& tensor) {
  return std::ranges::any_of(kFormats, [&](const WeightFormat& f) { return f.is_extra(tensor); });
}

}  // namespace md
