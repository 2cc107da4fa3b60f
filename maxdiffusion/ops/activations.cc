// Activations: compositions of elementwise operations, with the constants of their papers and of PyTorch.
#include <fmt/format.h>

#include <numbers>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor silu(Tensor x) { return x * sigmoid(x); }

namespace {

bool kernel_takes(Tensor x) { return x.rank() > 0 && kernels_support({x}); }

/// gelu of x, or gated_gelu if `gated`, by the CPU kernel.
Tensor call_gelu(Tensor x, const char* by, bool gated) {
  const std::string attributes = fmt::format("by = {}, gated = {}", mlir_string(by), gated);
  auto forward = [gated, attributes](const std::vector<Tensor>& in) {
    Shape y = in[0].shape();
    if (gated) y.dims.back() /= 2;
    return custom_call(in[0].graph(), in, {.target = kGeluKernel, .results = {y}, .backend_config = attributes});
  };
  auto backward = [attributes](const std::vector<Tensor>& in, const std::vector<Tensor>&, const Grads& dys) -> Grads {
    return custom_call(in[0].graph(), {in[0], dys[0]},
                       {.target = kGeluGradKernel, .results = {in[0].shape()}, .backend_config = attributes});
  };
  return custom_vjp({x}, forward, backward)[0];
}

}  // namespace

Tensor gelu(Tensor x) {
  if (kernel_takes(x)) return call_gelu(x, "erf", false);
  return (x * 0.5) * (erf(x * (1 / std::numbers::sqrt2)) + 1.0);
}

Tensor gated_gelu(Tensor x) {
  if (kernel_takes(x)) return call_gelu(x, "erf", true);
  const int64_t width = x.dim(-1) / 2;
  return slice_axis(x, -1, 0, width) * gelu(slice_axis(x, -1, width, 2 * width));
}

Tensor gelu_tanh(Tensor x) {
  if (kernel_takes(x)) return call_gelu(x, "tanh", false);
  // Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016.
  const double scale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // √(2/π)
  return (x * 0.5) * (tanh((x + x * x * x * 0.044715) * scale) + 1.0);
}

Tensor quick_gelu(Tensor x) {
  if (kernel_takes(x)) return call_gelu(x, "sigmoid", false);
  return x * sigmoid(x * 1.702);
}

}  // namespace md
