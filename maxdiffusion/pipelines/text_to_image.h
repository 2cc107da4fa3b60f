// Text to latents to pixels, for the Stable Diffusion family: encode, one loop over the scheduler's rows with guidance,
// decode. Sources: Ho and Salimans 2022 (classifier-free guidance); Rombach et al. 2022; Podell et al. 2023 (SDXL);
// Lin et al. 2023, section 3.4 (guidance rescale). Details follow diffusers' pipelines of the same models.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/tasks/encode.h"
#include "maxdiffusion/tasks/run_config.h"

namespace md {

/// A ControlNet beside the UNet. Its weights are the component "controlnet".
struct ControlOptions {
  ControlNetConfig config;
  HostArray picture;          // f32 [1, H, W, C] in [0, 1], for every picture drawn
  double scale = 1;           // of the residuals
  double start = 0, end = 1;  // part of the steps in which it acts
};

struct TextToImageOptions {
  std::vector<std::string> prompts;
  /// None: zeros where the model folder says so (SDXL's force_zeros_for_empty_prompt), the empty text elsewhere. One
  /// for all prompts, or one each.
  std::vector<std::string> negative_prompts;
  double guidance_scale = 7.5;  // at most 1: the model runs once a step
  double guidance_rescale = 0;  // 0: off
  int64_t num_inference_steps = 30, images_per_prompt = 1;
  int64_t batch = 0;                // pictures per run of the program; 0: all of them
  int64_t height = 64, width = 64;  // pixels, multiples of the autoencoder's downscale
  /// SDXL's micro-conditioning: height and width in pixels, top and left. Absent sizes: height and width above.
  std::optional<std::array<int64_t, 2>> original_size, target_size;
  std::array<int64_t, 2> crops_coords_top_left = {0, 0};
  uint64_t seed = 0;
  HostArray latents;             // f32 [N, h, w, C], standard normal; absent: drawn from the seed, picture by picture
  std::string scheduler_config;  // JSON text of scheduler_config.json after overrides
  std::optional<ControlOptions> control;
  ScopeOptions scope;
  CompileConfig compile;

  bool guided() const { return guidance_scale > 1; }
  int64_t pictures() const { return static_cast<int64_t>(prompts.size()) * images_per_prompt; }
};

/// The options that a run's keys ask for. `devices`: their number, for the batch. Throws invalid_config.
TextToImageOptions text_to_image_options(const RunConfig& config, const ModelFolder& folder, int64_t devices);

/// One row per picture, prompt-major: the pictures of one prompt follow each other.
struct PromptEmbeddings {
  TextEmbeddings positive, negative;  // negative: with guidance only
};
/// Throws invalid_config where negative_prompts are neither none, one, nor as many as the prompts.
PromptEmbeddings encode_prompts(TextEncoder& text, const ModelFolder& folder, const TextToImageOptions& options);

/// Latents f32 [N, h, w, C], still scaled. The whole denoising loop is one program; `weights` answers while it is
/// compiled. Throws invalid_config (sizes, steps, scheduler, latents), device where latents are not finite.
HostArray denoise(const Devices& devices, const ModelFolder& folder, const WeightsOf& weights,
                  const PromptEmbeddings& prompts, const TextToImageOptions& options);

/// Pictures f32 [N, H, W, 3] in [−1, 1] from latents of `denoise`; `tiled`: see PictureCoder.
HostArray decode_latents(PictureCoder& coder, const ModelFolder& folder, const HostArray& latents, bool tiled = false);

}  // namespace md
