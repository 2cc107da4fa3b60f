#include "maxdiffusion/optim/factored.h"

#include <cmath>
#include <utility>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

int64_t own_rank(const ParamForm& p) { return static_cast<int64_t>(p.dims.size()) - (p.stacked > 0 ? 1 : 0); }

/// A parameter's form without one of its last dims, counted from the end.
std::optional<StateArray> form_without(const ParamForm& p, std::ptrdiff_t from_end) {
  if (own_rank(p) < 2) return std::nullopt;
  StateArray a{{DType::f32, p.dims}, p.axes};
  a.shape.dims.erase(a.shape.dims.end() - from_end);
  if (!a.axes.empty()) a.axes.erase(a.axes.end() - from_end);
  return a;
}

}  // namespace

std::optional<StateArray> row_means_form(const ParamForm& p) { return form_without(p, 1); }
std::optional<StateArray> column_means_form(const ParamForm& p) { return form_without(p, 2); }
std::optional<StateArray> unfactored_form(const ParamForm& p) {
  return own_rank(p) < 2 ? std::optional(StateArray{{DType::f32, p.dims}, p.axes}) : std::nullopt;
}

std::vector<FusedCall> by_rank(FusedCall factored, FusedCall whole) {
  factored.config += ", factored = true";
  factored.takes = [](const ParamState& p) { return p.own_rank() >= 2; };
  whole.config += ", factored = false";
  return {std::move(factored), std::move(whole)};
}

Tensor root_mean_square(const ParamState& p, Tensor x) {
  const Axes axes = p.own_axes();
  return axes.empty() ? abs(x) : sqrt(mean(square(x), axes, true));
}

Tensor within_root_mean_square(const ParamState& p, Tensor x, double limit) {
  const Tensor factor = root_mean_square(p, x) * (1 / limit);
  return x / maximum(factor, scalar_like(factor, 1.0));
}

FactoredMeans with_squares(const FactoredMeans& means, Tensor squares, Tensor decay, Tensor added) {
  return {means.rows * decay + mean(squares, {-1}) * added, means.columns * decay + mean(squares, {-2}) * added};
}

Tensor inverse_root(const FactoredMeans& m) {
  return expand_dims(rsqrt(m.rows / mean(m.rows, {-1}, true)), -1) * expand_dims(rsqrt(m.columns), -2);
}

}  // namespace md
