// Activations: compositions of elementwise operations, with the constants of their papers and of PyTorch.
#include <numbers>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/custom_vjp.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor silu(Tensor x) { return x * sigmoid(x); }

Tensor gelu(Tensor x) { return (x * 0.5) * (erf(x * (1 / std::numbers::sqrt2)) + 1.0); }

Tensor gated_gelu(Tensor x) {
  const int64_t width = x.dim(-1) / 2;
  if (!kernels_take({x})) return slice_axis(x, -1, 0, width) * gelu(slice_axis(x, -1, width, 2 * width));
  auto forward = [width](const std::vector<Tensor>& in) {
    Shape half = in[0].shape();
    half.dims.back() = width;
    return custom_call(in[0].graph(), in, {.target = kGatedGeluKernel, .results = {half}, .backend_config = {}});
  };
  auto backward = [](const std::vector<Tensor>& in, const std::vector<Tensor>&, const Grads& dys) -> Grads {
    return custom_call(in[0].graph(), {in[0], dys[0]},
                       {.target = kGatedGeluGradKernel, .results = {in[0].shape()}, .backend_config = {}});
  };
  return custom_vjp({x}, forward, backward)[0];
}

Tensor gelu_tanh(Tensor x) {
  // Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016.
  const double scale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // √(2/π)
  return (x * 0.5) * (tanh((x + x * x * x * 0.044715) * scale) + 1.0);
}

Tensor quick_gelu(Tensor x) { return x * sigmoid(x * 1.702); }

}  // namespace md
