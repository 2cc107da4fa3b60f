// Media to latents and back: what every autoencoder answers, chosen by the class that config.json names (registry.h).
// Tensors have the batch (B) on axis 0; sizes of one sample leave it out. Channels are last.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/models/latent_scale.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// The root scope of a component: "unet", "text_encoder". Asked for once for each component that a function uses.
using Models = std::function<Scope(const std::string& component)>;

/// Height and width in pixels, and the number of frames; an image has one.
struct MediaSize {
  int64_t height = 0, width = 0, frames = 1;
};
/// What the layers keep between the chunks of one video, each [B, …] with as many axes as the pixels; nothing before
/// the first chunk.
using MediaState = std::vector<Tensor>;
/// Distribution of the latents, f32, of their sizes. Without a logvar they are the mean.
struct Posterior {
  Tensor mean, logvar;
};
/// mean + exp(logvar/2)·noise.
Tensor sample_posterior(const Posterior& p, Tensor noise);
/// KL(q ‖ N(0, I)), mean over the batch of the sum over elements. Scalar f32.
Tensor kl_divergence(const Posterior& p);

/// This class itself is that of models of pixels: their latents are the media. Constant once made; thread safe.
class Autoencoder {
 public:
  virtual ~Autoencoder() = default;

  std::string component;     // of the model folder: "vae"; empty: there is none, media are denoised as they are
  int64_t channels = 3;      // of latents
  int64_t downscale = 1;     // pixels on the side of one latent cell
  int64_t frame_scale = 0;   // 0: of images, without an axis of frames. Above: of videos, whose latents have one frame
                             // for the first and one for each `frame_scale` further frames
  int64_t decoder_tile = 0;  // side of the largest latents, in cells, that the decoder was made for; 0: any size
  LatentScale latent_scale;  // for the denoiser

  /// [H, W, 3] or [F, H, W, 3] of one sample; its latents; the size of media whose latents have these sizes.
  Dims pixel_dims(const MediaSize& size) const;
  Dims latent_dims(const MediaSize& size) const;
  MediaSize media_size(const Dims& latent) const;

  /// pixels: [B] + pixel_dims in [−1, 1] → their latents, unscaled. With a state pixels are the next frames of a video
  /// that is given in chunks, which together give what the whole gives: it holds what the chunk before left, and gets
  /// what this one leaves, of the same shapes. The first chunk has one frame or more, as a whole video; later ones have
  /// n·frame_scale, and n latent frames.
  virtual Posterior encode(const Models& models, Tensor pixels, MediaState* state) const;
  /// Latents, unscaled → [B] + pixel_dims, f32; the first chunk has one latent frame or more.
  virtual Tensor decode(const Models& models, Tensor latents, MediaState* state) const;
  /// For one just trained: its config.json with the scale measured on these moments, unscaled.
  virtual nlohmann::json with_measured_latent_scale(nlohmann::json config, const EachMoments& moments) const;
};

}  // namespace md
