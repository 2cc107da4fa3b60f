// `compile` and `plan`: what a run's training step takes, by its compiler, before anything of the run is there.
#pragma once

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Compiles the training step of `config` for the devices of its key `topology`, with no such device here and without
/// weights or data, and prints what it would take there: bytes on each device, work, and what the devices tell each
/// other. Throws invalid_config (no topology, a mesh that does not fit it), device (no compiler for it; the compiler
/// crashed), out_of_memory where the step does not fit a device, with the compiler's numbers.
void compile_for_topology(const RunConfig& config);

/// The same for the devices of `config`, which are this machine's where it names no topology. Also prints the parts of
/// the memory, and of a chip whose rates are known the least seconds that a step can take. Where the step does not fit,
/// the changes that commonly help are tried one by one, and out_of_memory says which of them makes it fit.
void plan(const RunConfig& config);

}  // namespace md
