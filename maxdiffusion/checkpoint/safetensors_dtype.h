// The element types of a safetensors header, one table for reader and writer.
// Source: the safetensors format description and its reference implementation's order of types.
#pragma once

#include <array>
#include <optional>
#include <string_view>

#include "maxdiffusion/base/dtype.h"

namespace md {

struct SafetensorsDType {
  std::string_view name;
  DType dtype;
};

/// The reference writer sorts tensors by this table from last to first: by alignment, then as listed.
inline constexpr std::array<SafetensorsDType, 15> kSafetensorsDTypes = {{
    {"BOOL", DType::pred},
    {"U8", DType::u8},
    {"I8", DType::s8},
    {"F8_E5M2", DType::f8e5m2},
    {"F8_E4M3", DType::f8e4m3fn},
    {"I16", DType::s16},
    {"U16", DType::u16},
    {"F16", DType::f16},
    {"BF16", DType::bf16},
    {"I32", DType::s32},
    {"U32", DType::u32},
    {"F32", DType::f32},
    {"F64", DType::f64},
    {"I64", DType::s64},
    {"U64", DType::u64},
}};

inline std::optional<DType> from_safetensors(std::string_view name) {
  for (const auto& d : kSafetensorsDTypes)
    if (d.name == name) return d.dtype;
  return std::nullopt;
}

/// Place in the table; the table holds every DType.
inline size_t safetensors_rank(DType t) {
  size_t i = 0;
  while (kSafetensorsDTypes[i].dtype != t) ++i;
  return i;
}

}  // namespace md
