// Low-rank approximation by truncated SVD (Eckart and Young 1936): of a weight's change (extraction), and of LoRA
// matrices of a larger rank (resizing).
#pragma once

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/lora/lora_file.h"

namespace md {

struct LowRankFactors {
  HostArray down, up;             // f32, sizes as in check_fits; both contain the square roots of the singular values
  double explained_variance = 1;  // retained fraction of the sum of squares
  int64_t rank() const { return down.dims()[0]; }
};

/// Approximates a matrix [out, in] or a convolution [out, in, k, k] of any float type. The rank is the smaller of
/// `rank` and the number of nonzero singular values, at least 1.
LowRankFactors truncated_svd(const HostArray& change, int64_t rank);
/// Approximates up·down, without alpha, with the smallest rank, at most `rank`, that retains the fraction `energy` of
/// the sum of squares.
LowRankFactors resized(const LoraPair& pair, int64_t rank, double energy = 1);

}  // namespace md
