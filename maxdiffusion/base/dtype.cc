#include "maxdiffusion/base/dtype.h"

#include <array>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/float_dtype.h"
#include "maxdiffusion/base/nearest.h"

namespace md {
namespace {

struct Row {
  DType type;
  size_t size;
  std::string_view name, mlir, python;
};

constexpr std::array kRows = {
    Row{DType::pred, 1, "pred", "i1", "bool"},
    Row{DType::s8, 1, "s8", "i8", "int8"},
    Row{DType::s16, 2, "s16", "i16", "int16"},
    Row{DType::s32, 4, "s32", "i32", "int32"},
    Row{DType::s64, 8, "s64", "i64", "int64"},
    Row{DType::u8, 1, "u8", "ui8", "uint8"},
    Row{DType::u16, 2, "u16", "ui16", "uint16"},
    Row{DType::u32, 4, "u32", "ui32", "uint32"},
    Row{DType::u64, 8, "u64", "ui64", "uint64"},
    Row{DType::f8e4m3fn, 1, "f8e4m3fn", "f8E4M3FN", "float8_e4m3fn"},
    Row{DType::f8e5m2, 1, "f8e5m2", "f8E5M2", "float8_e5m2"},
    Row{DType::bf16, 2, "bf16", "bf16", "bfloat16"},
    Row{DType::f16, 2, "f16", "f16", "float16"},
    Row{DType::f32, 4, "f32", "f32", "float32"},
    Row{DType::f64, 8, "f64", "f64", "float64"},
};

const Row& row(DType t) { return kRows[static_cast<size_t>(t)]; }

}  // namespace

size_t size_of(DType t) { return row(t).size; }
std::string_view to_string(DType t) { return row(t).name; }
std::string_view mlir_name(DType t) { return row(t).mlir; }

DType parse_dtype(std::string_view name) {
  std::vector<std::string> known;
  for (const Row& r : kRows) {
    if (name == r.name || name == r.python) return r.type;
    known.emplace_back(r.python);
  }
  fail(Code::invalid_config, "dtype is '{}'; expected one of: {}", name, nearest_first(std::string(name), known));
}

DType parse_float_dtype(std::string_view key, std::string_view name, std::vector<std::string> known) {
  for (const Row& r : kRows) {
    if (!is_float(r.type)) continue;
    if (name == r.name || name == r.python) return r.type;
    known.emplace_back(r.python);
  }
  fail(Code::invalid_config, "{} is '{}'; expected one of: {}", key, name, nearest_first(std::string(name), known));
}

bool is_float(DType t) { return t >= DType::f8e4m3fn; }
bool is_integer(DType t) { return t != DType::pred && !is_float(t); }
bool is_unsigned(DType t) { return t >= DType::u8 && t <= DType::u64; }

}  // namespace md
