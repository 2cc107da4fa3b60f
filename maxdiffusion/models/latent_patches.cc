#include "maxdiffusion/models/latent_patches.h"

#include "maxdiffusion/ops/shape.h"

namespace md {

namespace {
constexpr int64_t kSide = kLatentPatch;
}  // namespace

Tensor to_latent_patches(Tensor x) {
  const int64_t b = x.dim(0), h = x.dim(1) / kSide, w = x.dim(2) / kSide, c = x.dim(3);
  x = transpose(reshape(x, {b, h, kSide, w, kSide, c}), {0, 1, 3, 5, 2, 4});
  return reshape(x, {b, h, w, c * kSide * kSide});
}

Tensor from_latent_patches(Tensor x) {
  const int64_t b = x.dim(0), h = x.dim(1), w = x.dim(2), c = x.dim(3) / (kSide * kSide);
  x = transpose(reshape(x, {b, h, w, c, kSide, kSide}), {0, 1, 4, 2, 5, 3});
  return reshape(x, {b, h * kSide, w * kSide, c});
}

}  // namespace md
