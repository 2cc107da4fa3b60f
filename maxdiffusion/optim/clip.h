// Clipping of gradients: by value, then by the global norm.
#pragma once

#include "maxdiffusion/graph/graph.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {

/// The gradients of one update and how they are clipped.
struct ClippedGradients {
  std::vector<Tensor> unclipped;  // f32, before clipping; some may be absent
  double max_value = 0;           // largest magnitude of an element; ≤ 0: no limit
  Tensor norm;                    // f32 scalar: global norm of `unclipped`
  Tensor factor;                  // f32 scalar on elements of at most max_value; empty: 1

  Tensor clipped(size_t i) const;
};

/// `grads`: any float type, some may be absent; `axes`: mesh axes of each. On a mesh each device sums the squares of
/// its shards; one all-reduce adds them.
ClippedGradients clip(Graph& g, const OptimConfig& config, const std::vector<Tensor>& grads,
                      const std::vector<DimAxes>& axes);

}  // namespace md
