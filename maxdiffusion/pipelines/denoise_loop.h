// Prompts to latents to media, for every family: encode, one loop over the scheduler's rows with guidance, decode.
// Sources: Ho and Salimans 2022 (classifier-free guidance); Lin et al. 2023, section 3.4 (guidance rescale); Zhang et
// al. 2023 (ControlNet). Details follow diffusers' pipelines of the same models.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/pipelines/sample_keys.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// The ControlNet's input and how it acts; the model folder has it as a component.
struct ControlOptions {
  HostArray image;            // f32 [1, H, W, C] in [0, 1], for all samples
  double scale = 1;           // of the residuals
  double start = 0, end = 1;  // range of the steps in which it acts, as fractions
};

struct SampleOptions {
  std::vector<std::string> prompts;
  /// One for all prompts, or one for each. Empty: see FamilySpec::zero_empty_prompt.
  std::vector<std::string> negative_prompts;
  /// Of FamilySpec::second_text_fields: one for all prompts, or one for each. Empty: the prompts.
  std::vector<std::string> second_prompts = {};
  /// The same for the negative prompts.
  std::vector<std::string> second_negative_prompts = {};
  double guidance_scale = 7.5;           // 1 or less: no guidance, the model runs once a step
  double embedded_guidance = 1;          // see FamilySpec::embedded_guidance
  std::vector<double> guidance_scales;   // for each of FamilySpec::denoisers; empty: guidance_scale
  std::optional<double> boundary_ratio;  // absent: FamilySpec::boundary_ratio
  double guidance_rescale = 0;           // 0: off
  double cfg_normalization = 0;          // largest norm of a guided prediction, by that of the positive one; 0: any
  double cfg_truncation = 1;             // steps whose noise level is below 1 − this are not guided
  int64_t num_inference_steps = 30, images_per_prompt = 1;
  int64_t clip_skip = 0;   // of the prompts, not of the negative ones, as in diffusers
  int64_t text_batch = 0;  // captions that are encoded at a time; see TextEncoder::encode
  int64_t batch = 0;       // samples per run of the program; 0: all of them
  MediaSize size;
  std::optional<SizeHints> size_hints;  // what the denoiser is conditioned on; absent: `size`, not cropped
  uint64_t seed = 0;
  int64_t first_sample = 0;                // number of the first sample; its noise follows from seed and number
  std::vector<MediaSize> references = {};  // sizes of the reference images in the conditioning
  HostArray latents;  // f32 [N, h, w, C], standard normal; absent: generated from the seed, sample by sample
  nlohmann::json scheduler_config;                  // after overrides
  std::shared_ptr<const Scheduler> scheduler = {};  // of that config, where it has been made already
  std::optional<ControlOptions> control;
  ScopeOptions scope;
  CompileConfig compile;

  /// One program runs one step, so that progress is known, instead of all.
  bool step_by_step = false;
  StepCacheKeys cache;  // with a step cache, too, one program runs one step
  /// Called before the first and after every run of the program with the steps done and all steps.
  std::function<void(int64_t done, int64_t total)> progress;

  /// Whether any step is guided.
  bool guided() const { return guidance_scales.empty() ? guidance_scale > 1 : std::ranges::max(guidance_scales) > 1; }
  int64_t samples() const { return static_cast<int64_t>(prompts.size()) * images_per_prompt; }
};

/// The sampler of `options`: their own, or of their scheduler_config for samples of this family and size. Throws
/// invalid_config.
std::shared_ptr<const Scheduler> sampler_of(const Family& family, const SampleOptions& options);

/// What encode_prompts and denoise refuse of the options, before anything is computed: invalid_config (numbers of
/// texts, sizes, steps, scheduler, latents, keys of caches and of a ControlNet).
void check_sampling(const Family& family, const SampleOptions& options);

/// Conditioning by field, one row per sample, prompt-major: the samples of one prompt follow each other.
struct PromptConditioning {
  HostArrays positive, negative;  // negative: with guidance only
};
/// Throws invalid_config where one of the other lists of prompts is neither none, one, nor as many as the prompts.
PromptConditioning encode_prompts(TextEncoder& text, const Family& family, const SampleOptions& options);

/// What calls of `denoise` on the same devices, with the same weights, scope and compile, leave for the next: programs,
/// and on the devices the weights of all denoisers.
struct ResidentDenoiser {
  ProgramCache programs;
  ArrayMap weights;  // by input name
};
/// Latents f32 [N, h, w, C], still scaled. `weights` is called on another thread while a program is compiled. Of a
/// family with several denoisers one is on the devices at a time, and none stays there, without `resident`; with it
/// nothing is compiled or read again. Throws invalid_config (sizes, steps, scheduler, latents), device where latents
/// are not finite, what options.progress throws; `resident` can be used after any error.
HostArray denoise(const Devices& devices, const Family& family, const WeightsOf& weights,
                  const PromptConditioning& prompts, const SampleOptions& options,
                  ResidentDenoiser* resident = nullptr);

/// A program of `denoise`: the first of each denoiser, by its name.
struct SamplingGraph {
  std::string denoiser;
  std::unique_ptr<Graph> graph;
  ParamTable params;
};
/// What `denoise` would compile for `options`, without weights, prompts or ControlNet. Caches between steps are left
/// out: of two programs with them, this is the larger one's work.
std::vector<SamplingGraph> sampling_graphs(const Family& family, const SampleOptions& options,
                                           const GraphOptions& placed);

/// Media f32 [N, H, W, 3] in [−1, 1] from latents of `denoise`; `tiled`: see MediaAutoencoder. Throws device where they
/// are not finite.
HostArray decode_latents(MediaAutoencoder& coder, const Family& family, const HostArray& latents, bool tiled = false);

}  // namespace md
