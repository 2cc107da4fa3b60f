#include "maxdiffusion/models/autoencoder.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/ops/elementwise.h"

namespace md {

Dims Autoencoder::pixel_dims(const MediaSize& size) const {
  if (frame_scale == 0) return {size.height, size.width, 3};
  return {size.frames, size.height, size.width, 3};
}

Dims Autoencoder::latent_dims(const MediaSize& size) const {
  const Dims image = {size.height / downscale, size.width / downscale, channels};
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

nlohmann::json Autoencoder::with_measured_latent_scale(nlohmann::json config, const EachMoments&) const {
  return config;
}

}  // namespace md
