#include "maxdiffusion/optim/low_precision.h"

#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Mantissa bits, and the exponent below which the spacing is constant.
struct Format {
  int mantissa, least_exponent;
};
Format format_of(DType t) {
  switch (t) {
    case DType::bf16: return {7, -100};  // not -126: spacings would be subnormal f32 numbers
    case DType::f16: return {10, -14};
    case DType::f8e4m3fn: return {3, -6};
    case DType::f8e5m2: return {2, -14};
    default: fail(Code::internal, "round_stochastically: {} is not narrower than f32", to_string(t));
  }
}

/// x ← mix(x): every bit of the result depends on every bit of x. Source: the hash "lowbias32" of C. Wellons' search
/// for 32-bit functions of two multiplications (hash-prospector).
Tensor mixed(Tensor x) {
  auto number = [&](uint32_t v) { return constant(x.graph(), v, DType::u32); };
  auto fold = [&](int by) { x = bit_xor(x, shift_right_logical(x, number(static_cast<uint32_t>(by)))); };
  fold(16);
  x = x * number(0x7feb352d);
  fold(15);
  x = x * number(0x846ca68b);
  fold(16);
  return x;
}

/// A 32-bit random number per element from its row-major index and a key u32[2]. Threefry's twenty rounds would be a
/// hundred operations per element, and for each parameter for the compiler; for choosing a rounding direction this hash
/// suffices.
Tensor quick_bits(Tensor key, const Dims& dims) {
  const Shape shape{DType::u32, dims};
  Tensor index = full(key.graph(), 0, shape);
  int64_t stride = 1;
  for (int64_t axis = shape.rank(); axis-- > 0; stride *= shape.dim(axis))
    if (shape.dim(axis) > 1)
      index = index + iota(key.graph(), shape, axis) * constant(key.graph(), static_cast<double>(stride), DType::u32);
  auto word = [&](int64_t i) { return squeeze(slice_axis(key, 0, i, i + 1), 0); };
  return mixed(mixed(index + word(0)) + word(1));
}

Tensor round_one(Tensor x, DType to, Tensor key) {
  check(x.dtype() == DType::f32, Code::internal, "round_stochastically: of {}; expected f32", to_string(x.shape()));
  const Format f = format_of(to);
  // x = i + r with i a multiple of the spacing and 0 <= r < 1 in spacings. u, uniform in [0, 1), has as many bits as i
  // + u represents exactly: then i + r + u reaches i + 1 with probability exactly r.
  const int fraction = 23 - f.mantissa;
  Tensor exponent = bit_and(bitcast(x, DType::u32), constant(x.graph(), 0x7f800000, DType::u32));
  Tensor power = maximum(bitcast(exponent, DType::f32), scalar_like(x, std::ldexp(1.0, f.least_exponent)));
  Tensor distance = power * std::ldexp(1.0, -f.mantissa);
  Tensor bits = quick_bits(key, x.dims());
  Tensor u = cast(shift_right_logical(bits, scalar_like(bits, 32 - fraction)), DType::f32) * std::ldexp(1.0, -fraction);
  Tensor rounded = floor(x / distance + u) * distance;
  return cast(where(is_finite(x), rounded, x), to);
}

}  // namespace

LowPrecisionUpdate low_precision_update(const std::string& name) {
  if (name == "master_f32") return LowPrecisionUpdate::master_f32;
  if (name == "stochastic_rounding") return LowPrecisionUpdate::stochastic_rounding;
  if (name == "round_to_nearest") return LowPrecisionUpdate::round_to_nearest;
  fail(Code::invalid_config,
       "low_precision_update is '{}'; expected one of: master_f32, stochastic_rounding, round_to_nearest", name);
}

bool is_low_precision(DType t) { return is_float(t) && size_of(t) < size_of(DType::f32); }

std::vector<Tensor> round_stochastically(const std::vector<Tensor>& xs, DType to, Rng rng) {
  std::vector<Tensor> out;
  if (xs.empty()) return out;
  const auto n = static_cast<int64_t>(xs.size());
  const Tensor keys = optimization_barrier({random_bits(rng, {n, 2})})[0];  // computed once, not by every user
  for (int64_t i = 0; i < n; ++i)
    out.push_back(round_one(xs[static_cast<size_t>(i)], to, squeeze(slice_axis(keys, 0, i, i + 1), 0)));
  return out;
}

}  // namespace md
