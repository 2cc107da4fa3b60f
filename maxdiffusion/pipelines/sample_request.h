// A request to a pipeline as values, without files and devices; and the sampling options that follow from it for a
// model.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/pipelines/sample_keys.h"
#include "maxdiffusion/schedulers/scheduler_keys.h"

namespace md {

/// Stages of a request, in order: `encoded` once, `step` before the first and after every call of the denoiser's
/// program, `denoised` once, `decoded` once unless only latents are requested.
enum class SampleStage { encoded, step, denoised, decoded };
using SampleProgress = std::function<void(SampleStage stage, int64_t done, int64_t total)>;

/// What the model predicts between two steps.
struct SamplePreview {
  int64_t first = 0;              // number of the first image among those of the request
  std::vector<HostArray> images;  // u8 [H, W, 3]; of a video its middle frame
};

/// A ControlNet's input image and its settings.
struct ControlRequest {
  HostArray image;                   // u8 [H, W, 3] of any size; absent: none
  std::optional<double> scale = {};  // of the ControlNet's residuals; none: ImageToImage's, or 1 without an image
  double start = 0, end = 1;         // range of steps with the ControlNet, as fractions
};

/// The image of an ImageAdapter.
struct AdapterRequest {
  HostArray image;   // u8 [H, W, 3] of any size
  double scale = 1;  // of what the adapter adds
};

/// The fields of SampleKeys are the keys of the same names, with their meanings and defaults (`inspect keys`). The seed
/// is sample_seed, or 0 if that is null.
struct SampleRequest : SampleKeys {
  int64_t resolution = 512;              // default of height and width; with an image, its own size is the default
  SchedulerKeys scheduler;               // the sampler, instead of the model's
  StepCacheKeys cache;                   // predictions reused between steps
  std::vector<ControlRequest> controls;  // one for each ControlNet of the pipeline
  std::map<std::string, AdapterRequest> adapters;  // by ImageAdapter::name: one for each of the pipeline's
  /// u8 [H, W, 3] of any size: first and last image of a video; reference images; or the images that samples begin with
  /// (begins_with_images), of models of videos u8 [F, H, W, 3]: one for all prompts, or one each.
  std::vector<HostArray> images;
  /// Scaled latents f32 [N, h, w, C] of each sample in place of `images`, with height and width.
  HostArray image_latents;
  HostArray mask;            // u8 [H, W, 3] of any size, white where images are replaced; absent: everywhere
  HostArray latents;         // initial noise f32 [N, (F,) h, w, C], standard normal; absent: from the seed
  int64_t first_sample = 0;  // number of the first sample; noise depends on seed and number
  /// One seed per prompt instead of sample_seed; each prompt's samples are then numbered from first_sample on. Not with
  /// samplers that add noise (Scheduler::stochastic) or hires_scale. Empty: sample_seed for all.
  std::vector<uint64_t> seeds = {};
  bool decode = true;  // false: the result is latents only
  /// With preview_every. Called on the thread of generate() while the device computes the next step.
  std::function<void(SamplePreview)> preview = {};
  SampleProgress progress = {};  // called on the thread of generate(); an exception ends the request
  std::stop_token stop = {};     // ends the request: see DiffusionPipeline::generate
};

/// Samples per program call: `global` or, if that is 0, `per_device` on each device. With pixels_per_device, as many as
/// have at most that number of pixels over all their frames, and at least one on each device.
struct SampleBatch {
  double per_device = 1;
  int64_t global = 0, pixels_per_device = 0;
};

/// Whether a request's images are those that samples begin with (image to image). True for models without image
/// conditioning; for models with reference images, only if `strength`, a mask or `outpaint` is set.
bool begins_with_images(const SampleRequest& request, const Family& family);
/// Index of the first of `steps` steps that runs for image to image. Throws invalid_config if none does, naming `key`;
/// the note gives the least value of its last word, in hundredths, and the least number of steps with which one runs.
int64_t first_step_of(const Family& family, const std::string& key, double strength, int64_t steps);
/// Throws invalid_config if the family's media need another number of images than the request has.
void check_images(const SampleRequest& request, const Family& family);

/// Size of samples: height and width, or `resolution`; for videos num_frames.
MediaSize sample_size(const SampleKeys& keys, int64_t resolution, const Family& family);
/// Size of samples. If height and width are null, it follows from an image: a ControlNet's image size, rounded down to
/// multiples of 64; ReferenceImages::sample_size; or the size of the image that samples begin with, rounded down to a
/// size that the model supports.
MediaSize sample_size(const SampleRequest& request, const Family& family);
/// Throws invalid_config, naming the keys, if the family's models do not support media of this size.
void check_size(const SampleKeys& keys, const Family& family, const MediaSize& size);

/// Sampling options of `request` for a model on `devices` devices; the caller sets scope and compile.
/// `scheduler_config`: the text of scheduler_config.json. Throws invalid_config, before anything is computed, for
/// numbers of texts or images, sizes, steps, samplers, latents, caches and a ControlNet's range.
SampleOptions sample_options(const SampleRequest& request, const Family& family, const std::string& scheduler_config,
                             const SampleBatch& batch, int64_t devices);
/// Whether this request, whose options are `options`, may be generated as one with requests that differ from it in
/// texts and seeds alone: it has one prompt, begins with noise of its seed, and its sampler adds none.
bool may_be_joined(const SampleRequest& request, const SampleOptions& options);
/// The first request with the texts and seeds of all. Each gives what it gives alone, up to rounding.
SampleRequest joined(const std::vector<const SampleRequest*>& requests);

/// Samples per program call: at least one for each device.
int64_t sampling_batch(const SampleBatch& batch, int64_t devices);

}  // namespace md
