// The element types of a safetensors header, one table for reader and writer.
// Source: the safetensors format description and its reference implementation's order of types.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/dtype.h"
#include "maxdiffusion/base/error.h"

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

/// Types of the format that no DType is.
inline constexpr std::array<std::string_view, 7> kUnreadSafetensorsDTypes = {
    "F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"};

/// The type of a tensor of a file. Throws io: a type of the format that is not read is named as such; of a name that
/// the format lacks, the error's note is `damaged`.
inline DType safetensors_dtype(const std::string& file, const std::string& tensor, const std::string& name,
                               const std::string& damaged) {
  if (const std::optional<DType> known = from_safetensors(name)) return *known;
  std::vector<std::string_view> names;
  for (const SafetensorsDType& d : kSafetensorsDTypes) names.push_back(d.name);
  const bool unread = std::ranges::find(kUnreadSafetensorsDTypes, name) != kUnreadSafetensorsDTypes.end();
  Error e(Code::io, fmt::format("read '{}': tensor '{}' has the {}element type {}; expected one of {}", file, tensor,
                                unread ? "" : "unknown ", name, fmt::join(names, ", ")));
  if (unread)
    e.note("try: a file of these weights in another type, such as BF16");
  else if (!damaged.empty())
    e.note(damaged);
  throw e;
}

/// Place in the table; the table holds every DType.
inline size_t safetensors_rank(DType t) {
  size_t i = 0;
  while (kSafetensorsDTypes[i].dtype != t) ++i;
  return i;
}

}  // namespace md
