// Text to latents to pixels, for the Stable Diffusion family: encode, one loop over the scheduler's rows with guidance,
// decode. Source: Ho and Salimans 2022 (classifier-free guidance); Rombach et al. 2022.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/tasks/encode.h"

namespace md {

struct TextToImageOptions {
  std::string negative_prompt;
  double guidance_scale = 7.5;  // 1: the model runs once a step
  int64_t num_inference_steps = 30, num_images_per_prompt = 1;
  int64_t height = 64, width = 64;  // pixels, multiples of the autoencoder's downscale
  uint64_t seed = 0;
  std::string scheduler_config;  // JSON text of scheduler_config.json after overrides
  ScopeOptions scope;
  CompileConfig compile;
};

/// Pictures f32 [N, H, W, 3] in [−1, 1]; prompt-major: the pictures of one prompt follow each other. The whole
/// denoising loop is one program. `unet`: weights by input name. Throws invalid_config (sizes, steps, scheduler).
HostArray text_to_image(const Devices& devices, const ModelFolder& folder, const std::map<std::string, HostArray>& unet,
                        TextEncoder& text, PictureCoder& coder, const std::vector<std::string>& prompts,
                        const TextToImageOptions& options);

}  // namespace md
