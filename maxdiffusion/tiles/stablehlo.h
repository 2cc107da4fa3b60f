// A tile program as StableHLO: a loop over its grid, on whole arrays. It runs on every device, and is the reference for
// other printers. Unstored values are NaN, and so is scratch memory initially.
#pragma once

#include <vector>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

/// `arrays`: scalars and inputs in the program's order. Returns its outputs.
std::vector<Value> print_stablehlo(EmitCtx& c, const Program& program, const std::vector<Value>& arrays);

}  // namespace md::tiles
