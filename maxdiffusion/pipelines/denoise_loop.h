// Prompts to latents to media, for every family: encoding, one loop over the scheduler's rows with guidance, decoding.
// Sources: Ho and Salimans 2022 (classifier-free guidance); Lin et al. 2023, section 3.4 (guidance rescale); Zhang et
// al. 2023 (ControlNet). Details follow diffusers' pipelines of the same models.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/pipelines/sample_keys.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {

/// The error of samples that contain NaN or infinity; its code is device.
class NotFinite : public Error {
  using Error::Error;
};

/// Input and settings of a ControlNet, which is a component of the model folder.
struct ControlOptions {
  HostArray image;            // f32 [1, H, W, C] in [0, 1], for all samples
  double scale = 1;           // of the residuals
  double start = 0, end = 1;  // range of steps with the ControlNet, as fractions
};

struct SampleOptions {
  std::vector<std::string> prompts;
  /// One for all prompts, or one each. Empty: see FamilySpec::zero_empty_prompt.
  std::vector<std::string> negative_prompts;
  /// For FamilySpec::second_text_fields: one for all prompts, or one each. Empty: the prompts.
  std::vector<std::string> second_prompts = {};
  /// Likewise for the negative prompts.
  std::vector<std::string> second_negative_prompts = {};
  std::string prompt_syntax = "plain";   // see encoders/prompt_syntax.h
  double guidance_scale = 7.5;           // at most 1: no guidance, the model runs once per step
  double embedded_guidance = 1;          // see FamilySpec::embedded_guidance
  std::vector<double> guidance_scales;   // one for each of FamilySpec::denoisers; empty: guidance_scale
  std::optional<double> boundary_ratio;  // absent: FamilySpec::boundary_ratio
  double guidance_rescale = 0;           // 0: off
  double cfg_normalization = 0;          // largest norm of a guided prediction / the positive one's; 0: unlimited
  double cfg_truncation = 1;             // steps with a noise level below 1 − this are not guided
  GuidanceKeys guidance;                 // method, and steps with guidance
  int64_t num_inference_steps = 30, images_per_prompt = 1;
  int64_t clip_skip = 0;   // for the prompts, not the negative ones, as in diffusers
  int64_t text_batch = 0;  // captions encoded at a time; see TextEncoder::encode
  int64_t batch = 0;       // samples per run of the program; 0: all of them
  MediaSize size;
  std::optional<SizeHints> size_hints;  // the denoiser's size conditioning; absent: `size`, not cropped
  uint64_t seed = 0;
  /// Seeds of each prompt's samples; each prompt's samples are then numbered from first_sample on. Empty: `seed` for
  /// all.
  std::vector<uint64_t> seeds = {};
  int64_t first_sample = 0;                // number of the first sample; noise depends on seed and number
  std::vector<HostArray> references = {};  // reference images of the conditioning, u8 [H, W, 3]
  HostArray latents;  // f32 [N, h, w, C], standard normal; absent: generated from the seed, sample by sample
  std::optional<double> strength = {};  // image-to-image strength, for the written parameters
  int64_t first_step = 0;               // earlier steps do not run
  /// Steps whose noise is less than at this part of the way from noise to data do not run.
  std::optional<double> denoising_end = {};
  bool begins_without_noise = false;  // image_latents are the samples of first_step as they are
  /// Steps of the same image that ran before these, with fewer pixels.
  int64_t earlier_steps = 0;
  double aesthetic_score = 6, negative_aesthetic_score = 2.5;  // see SampleSettings
  /// f32 [N, h, w, C], scaled: samples begin with these images and the noise of first_step; absent: with noise only.
  HostArray image_latents = {};
  bool noise_alone = false;  // samples begin with noise only, even with image_latents
  /// f32 [1, h, w, 1]: at 0 samples keep image_latents, with the noise of each step; at 1 they are generated. Absent:
  /// generated everywhere.
  HostArray mask = {};
  nlohmann::json scheduler_config;                  // after overrides
  std::shared_ptr<const Scheduler> scheduler = {};  // of scheduler_config, if already constructed
  std::vector<ControlOptions> controls;             // of FamilySpec::controlnets, in order; empty: none acts
  ScopeOptions scope;
  CompileConfig compile;

  /// Runs one step per program call, so that progress is known; false: all steps in one call.
  bool step_by_step = false;
  StepCacheKeys cache;  // a step cache also implies one step per program call
  /// For weights that differ between steps, called before each one with the program's parameters: from then on the
  /// function `weights` of `denoise` returns what step `step` of `steps` needs. Returns the inputs whose values are
  /// others than before. Needs step_by_step.
  std::function<std::vector<std::string>(const ParamTable& params, int64_t step, int64_t steps)> change_weights = {};
  /// Called before a program is compiled, then before the first and after every call of it, with the number of finished
  /// steps and of all steps.
  std::function<void(int64_t done, int64_t total)> progress;

  /// Steps between calls of `preview`; 0: none. Above 0 it implies one step per program call.
  int64_t preview_every = 0;
  /// Called, while the device computes the next step, with a group of samples as the model predicts them without noise:
  /// the number of the first, and scaled latents f32 [n, h, w, C].
  std::function<void(int64_t first, const HostArray& latents)> preview;

  /// Whether any step is guided.
  bool guided() const { return guidance_scales.empty() ? guidance_scale > 1 : std::ranges::max(guidance_scales) > 1; }
  int64_t samples() const { return static_cast<int64_t>(prompts.size()) * images_per_prompt; }
  /// Seed of sample `i`'s noise, and the sample's number under that seed.
  uint64_t seed_of(int64_t i) const {
    return seeds.empty() ? seed : seeds.at(static_cast<size_t>(i / images_per_prompt));
  }
  int64_t number_of(int64_t i) const { return first_sample + (seeds.empty() ? i : i % images_per_prompt); }
};

/// The sampler of `options`: `scheduler` if set, else the one of scheduler_config for samples of this family and size.
/// Throws invalid_config.
std::shared_ptr<const Scheduler> sampler_of(const Family& family, const SampleOptions& options);

/// Number of timesteps that lie before this part of the way from noise to data, as diffusers'
/// pipelines of SDXL count them for denoising_end.
int64_t steps_before(const std::vector<double>& training_timesteps, double part,
                     const nlohmann::json& scheduler_config);

/// Checks the options before anything is computed. Throws invalid_config for everything that encode_prompts and denoise
/// reject: numbers of texts, sizes, steps, scheduler, latents, keys of caches and of a ControlNet.
void check_sampling(const Family& family, const SampleOptions& options);

/// Conditioning by field, one row per sample; samples of one prompt are adjacent.
struct PromptConditioning {
  HostArrays positive, negative;  // negative: with guidance only
  /// With AND in prompts: the fields of text of each further part of them, and f32 [samples, parts], the parts'
  /// weights.
  std::vector<HostArrays> further = {};
  HostArray weights = {};
  /// Where texts change between steps: row of the sampler's table → the inputs (inputs_of) that differ from there on.
  std::map<int64_t, HostArrays> changes = {};
};
/// The inputs of denoising programs that hold a conditioning: positive fields under their names, others with the prefix
/// negative_ or further_prefix; prompt_weights.
HostArrays inputs_of(const PromptConditioning& prompts);
std::string further_prefix(size_t part);
/// Throws invalid_config if another list of prompts is neither empty, nor of length 1, nor as long as the prompts.
PromptConditioning encode_prompts(TextEncoder& text, const Family& family, const SampleOptions& options);

/// State that calls of `denoise` share if devices, weights, scope and compile are the same: programs, and the weights
/// of all denoisers on the devices.
struct ResidentDenoiser {
  ProgramCache programs;
  ArrayMap weights;  // by input name
};
/// Returns latents f32 [N, h, w, C], still scaled. `weights` is called on another thread while a program is compiled.
/// Without `resident`, only one of several denoisers is on the devices at a time, and none remains there; with it,
/// later calls compile and read nothing. Throws invalid_config (sizes, steps, scheduler, latents), device if latents
/// are not finite, and what options.progress throws; `resident` stays valid after any error.
HostArray denoise(const Devices& devices, const Family& family, const WeightsOf& weights,
                  const PromptConditioning& prompts, const SampleOptions& options,
                  ResidentDenoiser* resident = nullptr);

/// A program of `denoise`; one for each denoiser.
struct SamplingGraph {
  std::string denoiser;
  std::unique_ptr<Graph> graph;
  ParamTable params;
};
/// The programs that `denoise` would compile for `options`, without weights, prompts or ControlNet. Caches between
/// steps are ignored: of the two programs that they use, this is the larger one.
std::vector<SamplingGraph> sampling_graphs(const Family& family, const SampleOptions& options,
                                           const GraphOptions& placed);

/// Decodes latents of `denoise` to media f32 [N, H, W, 3] in [−1, 1]; `tiled`: see MediaAutoencoder. Throws device if
/// the media are not finite.
HostArray decode_latents(MediaAutoencoder& coder, const Family& family, const HostArray& latents, bool tiled = false);

}  // namespace md
