// Denoising objective: mean of w(t)·m·(target − prediction)². A batch holds media and captions, or what the family's
// models make of them, or everything including the random numbers of a recorded run. m is 1, or with `masked` the mask
// at the latents' size, equal for all channels. The mean is over all elements, masked ones included, so that masks make
// the loss smaller, as in kohya's sd-scripts (apply_masked_loss). Sources: Ho et al. 2020 (DDPM); Rombach et al. 2022;
// Podell et al. 2023 (micro-conditioning); Ruiz et al. 2022 (DreamBooth).
#pragma once

#include <memory>
#include <optional>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/tasks/inputs.h"

namespace md {

/// Keys of denoising, without those of the noise (schedulers/process.h).
struct DenoiseKeys {
  double noise_offset = 0, input_perturbation = 0, caption_dropout = 0;
  bool train_text_encoder = false, cache_latents_text_encoder_outputs = true, masked_loss = false;
  std::string replay_batches;
  template <class V>
  void visit(V&& v) {
    v("noise_offset", noise_offset, "deviation of one shift of the noise per image and channel; 0: off", at_least(0));
    v("input_perturbation", input_perturbation, "deviation of noise added to the noise, unknown to the target; 0: off",
      at_least(0));
    v("caption_dropout", caption_dropout, "probability of training with the empty caption", in_range(0, below(1)));
    v("train_text_encoder", train_text_encoder, "train the text encoder as well (models with one)");
    v("cache_latents_text_encoder_outputs", cache_latents_text_encoder_outputs,
      "encode images and captions once; false: in every step");
    v("masked_loss", masked_loss, "weigh the loss by masks, of alpha_mask or conditioning_data_dir");
    v("replay_batches", replay_batches,
      "safetensors file whose step{i}.latents, .noise, .timesteps, .encoder_hidden_states, .text_embeds and .time_ids "
      "replace data and random numbers",
      KeyPath::input);
  }
};

struct DenoiseTask : Task {
  std::shared_ptr<const Family> family;
  std::shared_ptr<const NoiseProcess> process;
  std::shared_ptr<const MediaInput> media = moments_input();
  std::shared_ptr<const TextInput> text = embeddings_input();
  std::shared_ptr<const NoiseInput> noise = random_noise_input();
  int64_t batch_size = 1;
  MediaSize size;  // of the media, pixels
  /// What the denoiser is conditioned on where batches hold no sizes. Absent: `size`.
  std::optional<MediaSize> conditioning_size;
  double caption_dropout = 0;
  double guidance = 1;      // see FamilySpec::embedded_guidance
  bool masked = false;      // every batch has masks
  bool sizes = false;       // every batch has FamilySpec::size_conditioning
  bool images = false;      // every batch has ImageConditioning::fields
  std::string expert = {};  // of FamilySpec::denoisers, the one that is trained; empty: FamilySpec::denoiser
  std::string name = {};    // label(): how this task differs from the others of its run
  /// DreamBooth: the weight of the loss of a second batch, whose fields have the prefix class_. Absent: there is none.
  std::optional<double> prior_loss_weight;

  std::string model() const override { return expert.empty() ? family->spec().denoiser() : expert; }
  std::string label() const override { return name; }
  double sampling_weight() const override { return process->probability(); }
  /// If the batch has timesteps: whether they are those of the process. Throws invalid_config if only some are.
  bool accepts(const NamedShards& batch) const override;
  /// Fields of `media`, `text` and `noise`; mask f32 [B, h, w, 1]; the family's size fields; with caption_dropout those
  /// of `text` for the empty caption, without B and with the prefix empty_.
  std::vector<BatchField> batch() const override;
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override;
  Tensor batch_rows(Tensor replica, int64_t replicas) const override;
  std::optional<TimedLosses> timed_losses(const HostArrays& samples) const override;
  /// The loss before the mean over the batch: [B] f32, or [2B] with a class.
  Tensor sample_losses(const Models& models, const Feed& feed, Rng rng) const;
};

}  // namespace md
