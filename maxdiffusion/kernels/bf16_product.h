// Products of dense matrices of bf16 through oneDNN, for kernels that tile larger ones.
#pragma once

#include <compare>
#include <cstdint>

namespace md {

/// c = alpha·a·b + bias, or c += …: everything that the compiled code depends on.
struct Bf16Product {
  int64_t m, n, k;
  bool a_transposed = false, b_transposed = false;  // in memory: a [k, m], b [n, k]
  bool bf16_result = false;                         // else f32; sums are f32 either way
  bool bias = false, adds = false;
  float alpha = 1;
  auto operator<=>(const Bf16Product&) const = default;
};

/// a [m, k], b [k, n], bias f32 [n] (null unless `bias`), c [m, n], all dense: oneDNN is much slower for other strides.
/// Runs on the calling thread. Returns false if oneDNN fails.
bool multiply(const Bf16Product& p, const uint16_t* a, const uint16_t* b, const float* bias, void* c) noexcept;

}  // namespace md
