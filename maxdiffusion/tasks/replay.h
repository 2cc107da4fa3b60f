// Batches recorded from another program's run, with all random numbers, so that two programs can be compared step by
// step.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/schedulers/process.h"

namespace md {

struct Replay {
  std::unique_ptr<Dataset> data;  // latents, noise, timesteps, conditioning and size fields; position counts samples
  int64_t steps = 0, batch_size = 0, text_length = 0;
  Dims latent;  // of one sample, channels last
};

/// `file`: safetensors with, for i = 0, 1, …: step{i}.latents and .noise [B, C, …], .timesteps or .sigmas [B], and the
/// family's conditioning, size and image fields, of which prompt_embeds is called encoder_hidden_states and those with
/// the latents' axes are channels first; all steps of one shape. next() after the last step throws io. Throws io naming
/// the tensor that is missing or misshapen.
Replay open_replay(const std::string& file, const Family& family, std::shared_ptr<const NoiseProcess> process);

}  // namespace md
