#include "maxdiffusion/tasks/autoencoder.h"

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"

namespace md {

Tensor pixels_to_float(Tensor pixels) { return cast(pixels, DType::f32) / 127.5 - 1.0; }

std::vector<BatchField> Autoencoder::batch() const {
  return {{"pixels", {DType::u8, {batch_size, resolution, resolution, 3}}}};
}

Tensor Autoencoder::loss(const Models& models, const Feed& feed, Rng rng) const {
  const Scope s = models("vae");
  Tensor x = pixels_to_float(feed.at("pixels"));
  Posterior q = vae_encode(s, vae, x);
  Tensor z = sample_posterior(q, random_normal(rng.for_("posterior"), q.mean.shape()));
  Tensor reconstruction = mean(abs(cast(vae_decode(s, vae, z), DType::f32) - x));
  const double values = static_cast<double>(resolution * resolution * 3);
  return reconstruction + kl_divergence(q) * (kl_weight / values);
}

}  // namespace md
