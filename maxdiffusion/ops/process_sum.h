// Sums over the processes of a job (processes/), each of which runs the same program on devices of its own.
#pragma once

#include <vector>

#include "maxdiffusion/graph/graph.h"

namespace md {

/// The sums of f32 arrays over all processes, times `scale`; the same bits in each. One call for all arrays: of several
/// independent ones, two processes might make different ones first, and wait for ever. `axes`: mesh axes of each, of
/// which each device sums its part with the device of the same number elsewhere. Programs with it run on CPU devices
/// only. No gradient.
std::vector<Tensor> process_sum(const std::vector<Tensor>& xs, const std::vector<DimAxes>& axes, double scale);

}  // namespace md
