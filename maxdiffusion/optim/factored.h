// Factored second moments: the moments of a matrix are approximated by an outer product of the means of rows and the
// means of columns. For arrays with more dims, the matrix is the last two. Source: Shazeer and Stern 2018, "Adafactor".
#pragma once

#include <optional>

#include "maxdiffusion/optim/optimizer.h"

namespace md {

/// State arrays of the means, for parameters with at least two dims: the dims without the last, and without the second
/// last. None for other parameters.
std::optional<StateArray> row_means_form(const ParamForm& p);
std::optional<StateArray> column_means_form(const ParamForm& p);
/// State array of a parameter with fewer than two dims: f32, with its dims. None for other parameters.
std::optional<StateArray> unfactored_form(const ParamForm& p);

/// The calls for parameters of at least two dims and for others; they have an attribute `factored`.
std::vector<FusedCall> by_rank(FusedCall factored, FusedCall whole);

/// Root mean square of each layer's elements; reduced dims are kept with size 1.
Tensor root_mean_square(const ParamState& p, Tensor x);
/// x, scaled down if its root mean square is above `limit`.
Tensor within_root_mean_square(const ParamState& p, Tensor x, double limit);
/// Exponential means of rows and columns: old means are multiplied by `decay`, those of `squares` by `added`, and
/// summed.
struct FactoredMeans {
  Tensor rows, columns;
};
FactoredMeans with_squares(const FactoredMeans& means, Tensor squares, Tensor decay, Tensor added);
/// 1 / √ of the approximated second moments.
Tensor inverse_root(const FactoredMeans& means);

}  // namespace md
