// The square of the global norm of gradients.
#pragma once

#include "maxdiffusion/graph/graph.h"

namespace md {

/// Sums over all elements of all gradients, f32 scalars.
struct GradientSquares {
  Tensor as_given;  // Σ g²
  Tensor limited;   // Σ clamp(g, ±max_value)²; the same where max_value ≤ 0
};
/// `grads` (f32), at least one; `axes`: mesh axes of each. On a mesh each device sums over the parts that it holds, and
/// the devices' sums are added once.
GradientSquares gradient_squares(const std::vector<Tensor>& grads, const std::vector<DimAxes>& axes, double max_value);

/// Whether Σ g² is finite, of gradients of any float type of which some may be absent, and which lie as these inputs of
/// the graph do.
Tensor has_finite_norm(const std::vector<Tensor>& grads, const std::vector<Tensor>& inputs);

/// The mesh axes of values that are inputs of their graph; of others none.
std::vector<DimAxes> axes_of_inputs(const std::vector<Tensor>& values);

}  // namespace md
