// Denoising objective on cached latents and text embeddings: mean of w(t)·(target − prediction)².
// Source: Ho et al. 2020 (DDPM); Rombach et al. 2022; Podell et al. 2023 (micro-conditioning).
#pragma once

#include <array>

#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/tasks/task.h"

namespace md {

struct LatentDiffusion : Task {
  UNetConfig unet;
  NoiseSchedule noise;
  int64_t batch_size = 1, latent_height = 8, latent_width = 8, text_length = 77;
  int64_t resolution = 64;  // told to SDXL's micro-conditioning: original = target = resolution, no crop
  double snr_gamma = -1, caption_dropout = 0;

  std::string model() const override { return "unet"; }
  /// moments f32 [B, h, w, 2C] (mean, then standard deviation, both scaled), prompt_embeds f32 [B, L, D],
  /// text_embeds f32 [B, P] (SDXL), and, with caption_dropout, empty_prompt_embeds [L, D], empty_text_embeds [P].
  std::vector<BatchField> batch() const override;
  Tensor loss(const Scope& s, const Feed& feed, Rng rng) const override;
};

/// SDXL's time_ids [B, 6] f32: original size, crop, target size, in pixels (Podell et al. 2023, section 2.2).
Tensor micro_conditioning(Graph& g, int64_t batch, std::array<int64_t, 2> original_size,
                          std::array<int64_t, 2> crop_top_left, std::array<int64_t, 2> target_size);

}  // namespace md
