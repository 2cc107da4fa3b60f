// Batches recorded from another program's run with all random numbers, for a step-by-step comparison of two programs.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/schedulers/process.h"

namespace md {

struct Replay {
  std::unique_ptr<Dataset> data;  // latents, noise, timesteps, conditioning and size fields; position counts samples
  int64_t steps = 0, batch_size = 0, text_length = 0, references = 0;  // text_length, references: per sample
  Dims latent;                                                         // of one sample, channels last
};

/// `file`: safetensors with, for i = 0, 1, …: step{i}.latents and .noise [B, C, …], .timesteps or .sigmas [B], the
/// family's conditioning, size and image fields, and reference_0, reference_1, … with the latents' shape for reference
/// images. prompt_embeds is named encoder_hidden_states; fields with the latents' axes are channels first. All steps
/// have equal shapes. next() after the last step throws io. Throws io naming a missing or misshapen tensor.
Replay open_replay(const std::string& file, const Family& family, std::shared_ptr<const NoiseProcess> process);

}  // namespace md
