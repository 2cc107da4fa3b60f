// Inputs of a denoising task. Each defines its fields of the batch and how the graph reads them, so that the two cannot
// differ.
#pragma once

#include <memory>

#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

/// Sizes that the fields of one task share.
struct InputSizes {
  int64_t batch = 1;
  Dims latent;  // of one sample, channels last
};

/// Source of the clean latents.
class MediaInput {
 public:
  virtual ~MediaInput() = default;
  virtual std::vector<BatchField> fields(const Autoencoder& autoencoder, const InputSizes& sizes) const = 0;
  /// Scaled latents, f32 [B, …].
  virtual Tensor read(const Autoencoder& autoencoder, const Models& models, const Feed& feed, Rng rng) const = 0;
};
/// Field pixels, u8 [B] + Autoencoder::pixel_dims: the step runs the autoencoder.
std::shared_ptr<const MediaInput> pixels_input();
/// Field moments, f32 [B, …, 2C]: means and standard deviations, scaled; the step samples a latent from them.
std::shared_ptr<const MediaInput> moments_input();
/// Field latents, f32 [B, …, C], scaled.
std::shared_ptr<const MediaInput> latents_input();

/// Source of the conditioning.
class TextInput {
 public:
  virtual ~TextInput() = default;
  /// `references`: sizes of the reference images of each caption.
  virtual std::vector<BatchField> fields(const Family& family, int64_t batch,
                                         const std::vector<MediaSize>& references) const = 0;
  virtual Conditioning read(const Family& family, const Models& models, const Feed& feed) const = 0;
  /// Whether the fields are tokenized captions, not encoded ones.
  virtual bool tokens() const { return false; }
};
/// Token ids (FamilySpec::text_fields): the step runs the text encoders.
std::shared_ptr<const TextInput> tokens_input();
/// Encoded captions (FamilySpec::conditioning). `length` > 0: size of their first axis, if a file's captions have
/// another length than the family's.
std::shared_ptr<const TextInput> embeddings_input(int64_t length = 0);

/// Source of noise and timesteps.
class NoiseInput {
 public:
  virtual ~NoiseInput() = default;
  virtual std::vector<BatchField> fields(const NoiseProcess& process, const InputSizes& sizes) const = 0;
  struct RandomInputs {
    Tensor noise, t;  // ε, with the latents' shape; t: [B]
    Tensor added;     // noise of the latents: ε, or ε plus a perturbation that the target does not contain
  };
  virtual RandomInputs read(const NoiseProcess& process, const Shape& latents, const Feed& feed, Rng rng) const = 0;
  /// Whether the batch holds all random numbers, so that the step samples none.
  virtual bool recorded() const { return false; }
};
/// Noise of several resolutions: to noise that of sides of 1, 1/r, 1/r², … is added, enlarged bilinearly, times 1,
/// discount, discount², …; r in [2, 4) is random for each of them; ends after a side of 1. The sum is divided by its
/// deviation. Source: Whitaker 2023, as in kohya's sd-scripts (pyramid_noise_like), but with an r and a deviation of
/// each sample, so that a sample's noise does not depend on its batch.
struct MultiresNoise {
  int64_t iterations = 0;  // 0: off
  double discount = 0.3;
  /// noise: f32 [B, …, H, W, C].
  Tensor of(Tensor noise, Rng rng) const;
};
/// What is sampled in addition to noise. `offset`: deviation of one shift per sample and channel (Guttenberg 2023);
/// `perturbation`: deviation of what is added to ε (Ning et al. 2023).
struct RandomNoiseOptions {
  double offset = 0, perturbation = 0;
  MultiresNoise multires = {};
};
/// Noise and timesteps sampled in the step.
std::shared_ptr<const NoiseInput> random_noise_input(const RandomNoiseOptions& options = {});
/// Field timesteps [B]; the step samples the noise.
std::shared_ptr<const NoiseInput> given_timesteps_input();
/// Fields noise and timesteps, recorded from another program's run.
std::shared_ptr<const NoiseInput> recorded_noise_input();

}  // namespace md
