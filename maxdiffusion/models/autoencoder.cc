#include "maxdiffusion/models/autoencoder.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"

namespace md {

Tensor sample_posterior(const Posterior& p, Tensor noise) { return p.mean + exp(p.logvar * 0.5) * noise; }

Tensor kl_divergence(const Posterior& p) {
  Tensor terms = square(p.mean) + exp(p.logvar) - p.logvar - 1.0;
  return sum(terms) * (0.5 / static_cast<double>(p.mean.dim(0)));
}

Dims Autoencoder::pixel_dims(const MediaSize& size) const {
  if (frame_scale == 0) return {size.height, size.width, 3};
  return {size.frames, size.height, size.width, 3};
}

Dims Autoencoder::latent_dims(const MediaSize& size) const {
  Dims image = {size.height / downscale, size.width / downscale, channels};
  if (frame_scale == 0) return image;
  return {1 + (size.frames - 1) / frame_scale, image[0], image[1], channels};
}

MediaSize Autoencoder::media_size(const Dims& latent) const {
  if (frame_scale == 0) return {latent[0] * downscale, latent[1] * downscale};
  return {latent[1] * downscale, latent[2] * downscale, 1 + (latent[0] - 1) * frame_scale};
}

Posterior Autoencoder::encode(const Models&, Tensor pixels, MediaState*) const {
  return {cast(pixels, DType::f32), {}};
}

Tensor Autoencoder::decode(const Models&, Tensor latents, MediaState*) const { return cast(latents, DType::f32); }

Tensor Autoencoder::published_latents(const Models&, Tensor latents) const { return cast(latents, DType::f32); }

nlohmann::json Autoencoder::with_measured_latent_scale(nlohmann::json config, const EachMoments&) const {
  return config;
}

}  // namespace md
