// Thin matrices that come nearest to a given product: of a change of a weight (extraction) and of other thin matrices
// of a larger rank (resizing). Nearest in the sum of squares, by the largest singular values (Eckart and Young 1936).
#pragma once

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/lora/lora_file.h"

namespace md {

struct LowRankFactors {
  HostArray down, up;  // f32, of check_fits' sizes; the roots of the singular values are in both
  double kept = 1;     // of the sum of squares of what they stand for
  int64_t rank() const { return down.dims()[0]; }
};

/// Of a matrix [out, in] or a convolution [out, in, k, k] of any float type. The rank is `rank`, or the number of
/// singular values that are not zero where that is less (but 1 at least).
LowRankFactors truncated_svd(const HostArray& change, int64_t rank);
/// Of up·down, without alpha: the smallest rank, of `rank` at most, that keeps `energy` of the sum of squares.
LowRankFactors resized(const LoraPair& pair, int64_t rank, double energy = 1);

}  // namespace md
