// What a denoising task reads, as values: each owns its fields of the batch and how the graph reads them, so a batch
// cannot hold one thing and the graph read another.
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

/// Where clean latents come from.
class MediaInput {
 public:
  virtual ~MediaInput() = default;
  virtual std::vector<BatchField> fields(const Autoencoder& autoencoder, const InputSizes& sizes) const = 0;
  /// Scaled latents, f32 [B, …].
  virtual Tensor read(const Autoencoder& autoencoder, const Models& models, const Feed& feed, Rng rng) const = 0;
};
/// pixels, u8 [B] + Autoencoder::pixel_dims: the autoencoder runs in the step.
std::shared_ptr<const MediaInput> pixels_input();
/// moments, f32 [B, …, 2C]: means and deviations, scaled; a latent is sampled from them in the step.
std::shared_ptr<const MediaInput> moments_input();
/// latents, f32 [B, …, C], scaled.
std::shared_ptr<const MediaInput> latents_input();

/// Where the conditioning comes from.
class TextInput {
 public:
  virtual ~TextInput() = default;
  virtual std::vector<BatchField> fields(const Family& family, int64_t batch) const = 0;
  virtual Conditioning read(const Family& family, const Models& models, const Feed& feed) const = 0;
  /// Whether the fields are tokenized captions, not encoded ones.
  virtual bool tokens() const { return false; }
};
/// Token ids (FamilySpec::text_fields): the text encoders run in the step.
std::shared_ptr<const TextInput> tokens_input();
/// Encoded captions (FamilySpec::conditioning). `length` > 0: the size of their first axis, where a file holds
/// captions of another length than the family's.
std::shared_ptr<const TextInput> embeddings_input(int64_t length = 0);

/// Where noise and times come from.
class NoiseInput {
 public:
  virtual ~NoiseInput() = default;
  virtual std::vector<BatchField> fields(const NoiseProcess& process, const InputSizes& sizes) const = 0;
  struct RandomInputs {
    Tensor noise, t;  // ε of the latents' shape, [B]
    Tensor added;     // what the latents get: ε, or ε perturbed, which the target does not know
  };
  virtual RandomInputs read(const NoiseProcess& process, const Shape& latents, const Feed& feed, Rng rng) const = 0;
  /// Whether the batch holds all random numbers, so that nothing is sampled in the step.
  virtual bool recorded() const { return false; }
};
/// Noise and timesteps sampled in the step. `offset`: deviation of one shift per sample and channel (Guttenberg 2023);
/// `perturbation`: deviation of what is added to ε (Ning et al. 2023).
std::shared_ptr<const NoiseInput> random_noise_input(double offset = 0, double perturbation = 0);
/// timesteps [B] from the batch; the noise is sampled in the step.
std::shared_ptr<const NoiseInput> given_timesteps_input();
/// noise and timesteps, of another program's run.
std::shared_ptr<const NoiseInput> recorded_noise_input();

}  // namespace md
