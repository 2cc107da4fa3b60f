// Weights stored in less than float32. An update is often smaller than half the distance to the next number of such a
// type and would be lost by rounding to nearest; here are the ways to keep it.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/random.h"

namespace md {

enum class LowPrecisionUpdate {
  master,      // a float32 copy is updated, the weights are that copy rounded to nearest
  stochastic,  // the weights are updated and rounded up or down at random
  plain,       // the weights are updated and rounded to nearest
};
/// The value of the key low_precision_update. Throws invalid_config, listing the names, for another.
LowPrecisionUpdate low_precision_update(const std::string& name);

/// A float type with fewer bits than float32.
bool is_low_precision(DType t);

/// Each of xs (f32) as the narrow type `to`: an element becomes one of the two neighbours of its value, so that the
/// mean is that value. What `to` can hold stays as it is; so does what is not finite. Each element takes the bits of
/// `rng` for its index and its place in the list, so every sharding gives the same. Neighbours below 2^-100 (bf16) are
/// as far apart as at 2^-100. Source: Gupta et al. 2015, "Deep learning with limited numerical precision", section 3.
std::vector<Tensor> round_stochastically(const std::vector<Tensor>& xs, DType to, Rng rng);

}  // namespace md
