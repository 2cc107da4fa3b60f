// `compile`: a run's training step compiled for hardware that is not attached.
#pragma once

#include "maxdiffusion/run/run_config.h"

namespace md {

/// Compiles the training step of `config` for the devices of its key `topology`, with no such device here and without
/// weights or data, and prints what it would take there. Throws invalid_config (no topology, a mesh that does not fit
/// it), device (no compiler for it; the compiler crashed), out_of_memory where the step does not fit a device, with the
/// compiler's numbers.
void compile_for_topology(const RunConfig& config);

}  // namespace md
