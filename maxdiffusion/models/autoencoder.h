// Interface of autoencoders, selected by the class in config.json (registry.h). Tensors have the batch (B) on axis 0;
// sizes of one sample omit it. Channels are last.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/models/latent_scale.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// The root scope of a component: "unet", "text_encoder". Called once for each component that a function uses.
using Models = std::function<Scope(const std::string& component)>;

/// Height and width in pixels, and the number of frames; an image has one.
struct MediaSize {
  int64_t height = 0, width = 0, frames = 1;
};
/// Feature cache of the layers between chunks of a video, each [B, …] with the rank of the pixels; empty before the
/// first chunk.
using MediaState = std::vector<Tensor>;
/// Distribution of the latents, f32. Without a logvar the latents equal the mean.
struct Posterior {
  Tensor mean, logvar;
};
/// mean + exp(logvar/2)·noise.
Tensor sample_posterior(const Posterior& p, Tensor noise);
/// KL(q ‖ N(0, I)), mean over the batch of the sum over elements. Scalar f32.
Tensor kl_divergence(const Posterior& p);

/// Base class; it is the identity, for models on pixels. Immutable; thread safe.
class Autoencoder {
 public:
  virtual ~Autoencoder() = default;

  std::string component;                 // of the model folder: "vae"; empty: none, the model works on pixels
  int64_t channels = 3;                  // of latents
  int64_t downscale = 1;                 // pixels per latent cell along a side
  int64_t frame_scale = 0;               // 0: images, without a frame axis. > 0: videos, whose latents have one frame
                                         // for the first and one for each `frame_scale` further frames
  bool encodes_whole = false;            // whether `encode` takes whole videos only, without a state
  int64_t decoder_tile = 0;              // tile size of the decoder in latent cells; 0: any size
  int64_t decoder_multiple = 1;          // sides of the decoder's input are multiples of this
  LatentScale latent_scale;              // for the denoiser
  bool other_published_latents = false;  // whether published_latents differ from the denoiser's

  /// Sizes of one sample's pixels, [H, W, 3] or [F, H, W, 3], and of its latents; and the inverse: the media size of
  /// latents.
  Dims pixel_dims(const MediaSize& size) const;
  Dims latent_dims(const MediaSize& size) const;
  MediaSize media_size(const Dims& latent) const;

  /// pixels: [B] + pixel_dims in [−1, 1] → their latents, unscaled. With a state, pixels are the next chunk of a video:
  /// the state is the cache of the previous chunk, and is replaced by this chunk's, of the same shapes. Chunks give the
  /// same result as the whole video. The first chunk has at least one frame; later ones have n·frame_scale frames and n
  /// latent frames.
  virtual Posterior encode(const Models& models, Tensor pixels, MediaState* state) const;
  /// Latents, unscaled → [B] + pixel_dims, f32; the first chunk has at least one latent frame.
  virtual Tensor decode(const Models& models, Tensor latents, MediaState* state) const;
  /// Converts the denoiser's unscaled latents to those that diffusers' pipelines of this class return
  /// (output_type=latent), f32.
  virtual Tensor published_latents(const Models& models, Tensor latents) const;
  /// config.json of a trained autoencoder, with the scale measured from these unscaled moments.
  virtual nlohmann::json with_measured_latent_scale(nlohmann::json config, const EachMoments& moments) const;
};

}  // namespace md
