// Rounding of sizes to multiples.
#pragma once

#include <cstdint>

namespace md {

/// The smallest multiple of `step` that is at least `n`. n ≥ 0, step > 0.
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace md
