// A tile program as an operation of a graph: a custom kernel on TPUs and GPUs, StableHLO elsewhere. The partitioner
// supports neither; on meshes use it inside manual computations only.
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

/// `arrays`: scalars and inputs in the program's order. Returns its outputs. Throws invalid_graph if shapes differ from
/// the program's. No gradient; wrap it with custom_vjp.
std::vector<Tensor> call(const Program& program, const std::vector<Tensor>& arrays, double flops = 0);

extern const OpDef kTileProgram;

}  // namespace md::tiles
