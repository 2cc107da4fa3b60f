#include "maxdiffusion/models/latent_patches.h"

#include "maxdiffusion/ops/shape.h"

namespace md {

Tensor to_latent_patches(Tensor x, int64_t n) {
  if (n == 1) return x;
  const int64_t b = x.dim(0), h = x.dim(1) / n, w = x.dim(2) / n, c = x.dim(3);
  return reshape(transpose(reshape(x, {b, h, n, w, n, c}), {0, 1, 3, 5, 2, 4}), {b, h, w, c * n * n});
}

Tensor from_latent_patches(Tensor x, int64_t n) {
  if (n == 1) return x;
  const int64_t b = x.dim(0), h = x.dim(1), w = x.dim(2), c = x.dim(3) / (n * n);
  return reshape(transpose(reshape(x, {b, h, w, c, n, n}), {0, 1, 4, 2, 5, 3}), {b, h * n, w * n, c});
}

}  // namespace md
