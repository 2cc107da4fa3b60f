// Sums over the processes of a job (processes/) that run the same program on separate devices.
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Sums of f32 arrays over all processes, times `scale`, bit-identical in each. All arrays are in one call: several
/// independent calls could deadlock if processes order them differently. `axes`: mesh axes of each array; each device
/// sums its shard with the device of the same index in other processes. CPU devices only. No gradient.
std::vector<Tensor> process_sum(const std::vector<Tensor>& xs, const std::vector<DimAxes>& axes, double scale);

}  // namespace md
