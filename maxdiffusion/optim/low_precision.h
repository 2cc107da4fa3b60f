// Updates of weights stored in less than float32. Rounding to nearest loses updates below half a unit in the last
// place; master copies and stochastic rounding keep them.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/ops/random.h"

namespace md {

enum class LowPrecisionUpdate {
  master_f32,           // a float32 copy is updated, the weights are that copy rounded to nearest
  stochastic_rounding,  // the weights are updated and rounded up or down at random
  round_to_nearest,     // the weights are updated and rounded to nearest
};
/// The value of the key low_precision_update. Throws invalid_config, listing the names, for an unknown one.
LowPrecisionUpdate low_precision_update(const std::string& name);

/// A float type with fewer bits than float32.
bool is_low_precision(DType t);

/// Rounds each of xs (f32) to the type `to`: up or down at random, with the exact value as the mean. Representable
/// values, NaN and infinity are unchanged. Random bits depend on the element's index and the array's position in the
/// list, so the result is the same for every sharding. Below 2^-100 (bf16) the spacing is that of 2^-100. Source: Gupta
/// et al. 2015, "Deep learning with limited numerical precision", section 3.
std::vector<Tensor> round_stochastically(const std::vector<Tensor>& xs, DType to, Rng rng);

}  // namespace md
