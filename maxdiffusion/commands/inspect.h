// `inspect`: the value of each stage of a run.
#pragma once

#include <string>

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Prints one stage's value to standard output. `what`: mesh, plan, params, batch, graph, program or memory. Throws
/// invalid_config for another.
void inspect(const std::string& what, const RunConfig& config);

}  // namespace md
