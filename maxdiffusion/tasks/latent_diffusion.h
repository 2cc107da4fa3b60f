// Denoising objective: mean of w(t)·m·(target − prediction)². A batch holds pictures and token ids, what the
// autoencoder and the text encoders make of them, or everything including the draws of a recorded run. m is 1, or with
// `masked` the mask at the latents' size, the same for all channels; the mean is over all elements, those without
// weight included, as kohya's sd-scripts do (apply_masked_loss): what is masked out makes the loss smaller. Source: Ho
// et al. 2020 (DDPM); Rombach et al. 2022; Podell et al. 2023 (micro-conditioning).
#pragma once

#include <array>
#include <optional>

#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/tasks/model_folder.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

struct LatentDiffusion : Task {
  ModelFolder folder;  // its configs
  NoiseSchedule noise;
  int64_t batch_size = 1, latent_height = 8, latent_width = 8, text_length = 77;
  int64_t resolution = 64;  // told to SDXL's micro-conditioning: original = target = resolution, no crop
  double snr_gamma = -1, caption_dropout = 0, noise_offset = 0, input_perturbation = 0;
  TimestepBias timestep_bias;
  bool from_pixels = false;   // the autoencoder runs in the step
  bool from_latents = false;  // the autoencoder ran before, and a latent was drawn
  bool from_ids = false;      // the text encoders run in the step
  bool replay = false;        // nothing is drawn
  bool masked = false;        // every batch brings masks
  bool sizes = false;         // SDXL: every batch brings time_ids; `resolution` is not told
  bool bucket = false;        // one of several sizes
  bool at_timesteps = false;  // timesteps are given, not drawn
  /// DreamBooth: a second batch, whose fields have the prefix class_, whose loss counts this much. Absent: none.
  std::optional<double> prior_loss_weight;

  std::string model() const override { return "unet"; }
  std::string variant() const override;  // width x height in pixels
  /// moments f32 [B, h, w, 2C] (mean, then standard deviation, both scaled), pixels u8 [B, 8h, 8w, 3], or latents
  /// f32 [B, h, w, C], scaled; mask f32 [B, h, w, 1]; time_ids f32 [B, 6];
  /// prompt_embeds f32 [B, L, D] and text_embeds f32 [B, P] (SDXL), or ids s32 [B, L] and ids_2; with caption_dropout
  /// the same of the empty caption without B and with the prefix empty_.
  /// at_timesteps: also timesteps s32 [B].
  /// replay: latents and noise f32 [B, h, w, C], timesteps s32 [B], prompt_embeds, text_embeds, time_ids f32 [B, 6].
  std::vector<BatchField> batch() const override;
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override;
  /// The same before the mean over the batch: [B] f32, or [2B] with a class.
  Tensor sample_losses(const Models& models, const Feed& feed, Rng rng) const;
};

/// SDXL's time_ids [B, 6] f32: original size, crop, target size, in pixels (Podell et al. 2023, section 2.2).
Tensor micro_conditioning(Graph& g, int64_t batch, std::array<int64_t, 2> original_size,
                          std::array<int64_t, 2> crop_top_left, std::array<int64_t, 2> target_size);

}  // namespace md
