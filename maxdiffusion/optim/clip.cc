#include "maxdiffusion/optim/clip.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md {
namespace {

/// Sums over all elements of all gradients, f32 scalars.
struct GradientSquares {
  Tensor without_clipping;  // Σ g²
  Tensor limited;           // Σ clamp(g, ±max_value)²; the same where max_value ≤ 0
};

using AxisNames = std::vector<std::string>;

/// f32[2]: Σ g² of the elements, and of the clamped elements.
Tensor squares_by_kernel(const std::vector<Tensor>& grads, double max_value) {
  Tensor sum;
  for (size_t from = 0; from < grads.size(); from += kPerCall) {
    const auto first = grads.begin() + static_cast<std::ptrdiff_t>(from);
    const std::vector<Tensor> part(first, first + static_cast<std::ptrdiff_t>(std::min(kPerCall, grads.size() - from)));
    CustomCall call{.target = kSumOfSquaresKernel,
                    .results = {Shape{DType::f32, {2}}},
                    .backend_config = fmt::format("max_value = {:.17e} : f64", max_value)};
    const Tensor squares = custom_call(grads[0].graph(), part, call)[0];
    sum = sum ? sum + squares : squares;
  }
  return sum;
}

/// As squares_by_kernel, on one device; f32[1] without a limit.
Tensor squares_here(const std::vector<Tensor>& grads, double max_value) {
  if (kernels_support(grads)) return squares_by_kernel(grads, max_value);
  std::vector<Tensor> sums = {sum_of_squares(grads)};
  if (max_value > 0) {
    std::vector<Tensor> limited;
    for (Tensor g : grads) limited.push_back(clamp(g, -max_value, max_value));
    sums.push_back(sum_of_squares(limited));
  }
  return stack(sums, 0);
}

/// Mesh axes that shard any dim.
std::set<std::string> splitting(const DimAxes& axes) {
  std::set<std::string> names;
  for (const auto& of_dim : axes) names.insert(of_dim.begin(), of_dim.end());
  return names;
}

Tensor squares_on_mesh(const std::vector<Tensor>& grads, const std::vector<DimAxes>& axes, double max_value) {
  std::set<std::string> all;
  for (const DimAxes& a : axes) all.merge(splitting(a));
  // Gradients with equal sharding are summed together. Replicated values count once.
  return per_device(grads, axes, {{}}, [&](const std::vector<Tensor>& parts) {
    std::map<std::set<std::string>, std::vector<Tensor>> by_split;
    for (size_t i = 0; i < parts.size(); ++i) by_split[splitting(axes[i])].push_back(parts[i]);
    Tensor total;
    for (const auto& [split, some] : by_split) {
      AxisNames whole;
      std::ranges::set_difference(all, split, std::back_inserter(whole));
      const auto holders = static_cast<double>(devices_along(some[0].graph().options(), whole));
      Tensor sum = squares_here(some, max_value);
      if (holders > 1) sum = sum * (1 / holders);
      total = total ? total + sum : sum;
    }
    return std::vector<Tensor>{total};
  })[0];
}

GradientSquares gradient_squares(const std::vector<Tensor>& grads, const std::vector<DimAxes>& axes, double max_value) {
  const GraphOptions& o = grads[0].graph().options();
  const bool split = std::ranges::any_of(axes, [](const DimAxes& a) { return !splitting(a).empty(); });
  const bool by_parts = !o.one_device() && (split || kernels_support_shards(grads));
  const Tensor squares = by_parts ? squares_on_mesh(grads, axes, max_value) : squares_here(grads, max_value);
  auto element = [&](int64_t i) { return squeeze(slice_axis(squares, 0, i, i + 1), 0); };
  return {element(0), element(squares.dim(0) - 1)};
}

}  // namespace

Tensor ClippedGradients::clipped(size_t i) const {
  Tensor g = unclipped[i];
  if (max_value > 0) g = clamp(g, -max_value, max_value);
  return factor ? g * factor : g;
}

ClippedGradients clip(Graph& g, const OptimConfig& config, const std::vector<Tensor>& grads,
                      const std::vector<DimAxes>& axes) {
  ClippedGradients c{.unclipped = {}, .max_value = config.max_grad_value, .norm = {}, .factor = {}};
  std::vector<Tensor> live;
  std::vector<DimAxes> axes_of_live;
  for (size_t i = 0; i < grads.size(); ++i) {
    c.unclipped.push_back(grads[i] ? cast(grads[i], DType::f32) : Tensor());
    if (!grads[i]) continue;
    live.push_back(c.unclipped[i]);
    axes_of_live.push_back(axes[i]);
  }
  if (live.empty()) {
    c.norm = constant(g, 0.0);
    return c;
  }
  const GradientSquares squares = gradient_squares(live, axes_of_live, config.max_grad_value);
  c.norm = sqrt(squares.without_clipping);
  if (const Tensor norm = sqrt(squares.limited); config.max_grad_norm > 0)
    c.factor = minimum(config.max_grad_norm / norm, scalar_like(norm, 1.0));
  return c;
}

}  // namespace md
