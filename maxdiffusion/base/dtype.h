// Element types of tensors, as StableHLO, safetensors and PJRT know them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace md {

enum class DType : uint8_t {
  pred,
  s8,
  s16,
  s32,
  s64,
  u8,
  u16,
  u32,
  u64,
  f8e4m3fn,
  f8e5m2,
  bf16,
  f16,
  f32,
  f64,
};

/// Bytes of one element (pred: 1).
size_t size_of(DType t);
/// "f32", "bf16", "s32", … as in messages.
std::string_view to_string(DType t);
/// "f32", "bf16", "i32", "ui32", "i1", "f8E4M3FN", … as in MLIR.
std::string_view mlir_name(DType t);
/// Accepts the names users type ("float32", "bfloat16", "f32", "int32", …). Throws invalid_config otherwise.
DType parse_dtype(std::string_view name);
bool is_float(DType t);
bool is_integer(DType t);  // signed or unsigned, not pred
bool is_unsigned(DType t);

}  // namespace md
