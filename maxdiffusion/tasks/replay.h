// Batches recorded from another program's run, with every random draw, so that two programs can be compared step by
// step.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/data/batches/dataset.h"

namespace md {

struct Replay {
  std::unique_ptr<Dataset> data;  // fields as LatentDiffusion's with `replay`; position counts samples
  int64_t steps = 0, batch_size = 0, latent_height = 0, latent_width = 0, text_length = 0;
};

/// `file`: safetensors with, for i = 0, 1, …: step{i}.latents and .noise [B, C, h, w], .timesteps [B],
/// .encoder_hidden_states [B, L, D] and, for SDXL, .text_embeds [B, P] and .time_ids [B, 6]; all steps of one shape.
/// next() after the last step throws io. Throws io naming the tensor that is missing or misshapen.
Replay open_replay(const std::string& file, bool micro_conditioning);

}  // namespace md
