// A tile program as an operation of a graph: a kernel of our own on TPUs, StableHLO elsewhere. The partitioner knows
// neither: on meshes inside manual computations only.
#pragma once

#include <memory>
#include <vector>

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/tiles/program.h"

namespace md::tiles {

struct Call {
  std::shared_ptr<const Program> program;
  double flops = 0;  // of its matrix products
};

/// `arrays`: scalars and inputs in the program's order, which must be of its shapes (invalid_graph). Returns its
/// outputs. No gradient; wrap it with custom_vjp.
std::vector<Tensor> call(const Program& program, const std::vector<Tensor>& arrays, double flops = 0);

extern const OpDef kTileProgram;

}  // namespace md::tiles
