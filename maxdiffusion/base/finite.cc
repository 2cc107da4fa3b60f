#include "maxdiffusion/base/finite.h"

#include <algorithm>

namespace md {
namespace {

/// Infinities and NaNs are the numbers whose exponent bits are all 1: those with every bit of `exponent`.
template <class Bits>
std::optional<int64_t> first_with(const HostArray& array, Bits exponent) {
  const auto* v = reinterpret_cast<const Bits*>(array.data());
  const auto n = static_cast<int64_t>(array.bytes() / sizeof(Bits));
  constexpr int64_t kBlock = 4096;  // elements checked without a branch, so that the loop is vectorized
  for (int64_t at = 0; at < n; at += kBlock) {
    const int64_t end = std::min(n, at + kBlock);
    Bits any = 0;
    for (int64_t i = at; i < end; ++i) any |= static_cast<Bits>((v[i] & exponent) == exponent);
    if (any == 0) continue;
    while ((v[at] & exponent) != exponent) ++at;
    return at;
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> first_not_finite(const HostArray& array) {
  switch (array.dtype()) {
    case DType::f64: return first_with<uint64_t>(array, 0x7ff0'0000'0000'0000);
    case DType::f32: return first_with<uint32_t>(array, 0x7f80'0000);
    case DType::bf16: return first_with<uint16_t>(array, 0x7f80);
    case DType::f16: return first_with<uint16_t>(array, 0x7c00);
    case DType::f8e5m2: return first_with<uint8_t>(array, 0x7c);
    case DType::f8e4m3fn:
      return first_with<uint8_t>(array, 0x7f);  // no infinities: finite numbers use this exponent as well
    default: return std::nullopt;
  }
}

}  // namespace md
