// Activations: compositions of elementwise operations, with the constants of their papers and of PyTorch.
#include <numbers>

#include "maxdiffusion/ops/elementwise.h"

namespace md {

Tensor silu(Tensor x) { return x * sigmoid(x); }

Tensor gelu(Tensor x) { return (x * 0.5) * (erf(x * (1 / std::numbers::sqrt2)) + 1.0); }

Tensor gelu_tanh(Tensor x) {
  // Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016.
  const double scale = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // √(2/π)
  return (x * 0.5) * (tanh((x + x * x * x * 0.044715) * scale) + 1.0);
}

Tensor quick_gelu(Tensor x) { return x * sigmoid(x * 1.702); }

}  // namespace md
