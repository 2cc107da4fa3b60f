// A request to a pipeline, as values: no files, no devices. And a model's options that follow from it.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/pipelines/sample_keys.h"
#include "maxdiffusion/schedulers/scheduler_keys.h"

namespace md {

/// How far a request is, in this order: `encoded` once, `step` with no step done and after every run of the denoiser's
/// program, `denoised` once, `decoded` once unless only latents are requested.
enum class SampleStage { encoded, step, denoised, decoded };
using SampleProgress = std::function<void(SampleStage stage, int64_t done, int64_t total)>;

/// The image that a ControlNet reads, and how it acts.
struct ControlRequest {
  HostArray image;            // u8 [H, W, 3] of any size; absent: none
  double scale = 1;           // of what the ControlNet adds
  double start = 0, end = 1;  // part of the steps in which it acts
};

/// The fields of SampleKeys are the keys of the same names, with their meanings and defaults (`inspect keys`); the seed
/// is sample_seed, 0 where it is null.
struct SampleRequest : SampleKeys {
  int64_t resolution = 512;  // height and width where they are null; with an image these are its own
  SchedulerKeys scheduler;   // which sampler, in place of the model's
  StepCacheKeys cache;       // predictions reused between steps
  ControlRequest control;    // for a pipeline with a ControlNet, which needs it
  /// u8 [H, W, 3] of any size: what a video begins with, and ends with; or reference images.
  std::vector<HostArray> images;
  HostArray latents;         // initial noise f32 [N, (F,) h, w, C], standard normal; absent: of the seed
  int64_t first_sample = 0;  // number of the first sample; its noise follows from seed and number
  bool decode = true;        // false: the result is latents only
  /// One program runs one step, so that `progress` is called and `stop` acts after each. Videos do so anyway, unless
  /// scan_diffusion_loop. Otherwise one program runs all steps.
  bool step_by_step = false;
  SampleProgress progress = {};  // on the thread of generate(); what it throws ends the request
  std::stop_token stop = {};     // ends the request: see DiffusionPipeline::generate
};

/// Samples of one run of a program: `global` or, if that is 0, `per_device` on each device; with pixels_per_device, as
/// many as have no more pixels, all their frames counted, and at least one on each device.
struct SampleBatch {
  double per_device = 1;
  int64_t global = 0, pixels_per_device = 0;
};

/// Of samples: height and width, or `resolution`; of videos num_frames.
MediaSize sample_size(const SampleKeys& keys, int64_t resolution, const Family& family);
/// The same, with the size of an image where height and width are null: of a ControlNet's its own, rounded down to
/// multiples of 64; of reference images ReferenceImages::sample_size.
MediaSize sample_size(const SampleRequest& request, const Family& family);
/// Throws invalid_config, naming the keys, where a family's models cannot generate media of this size.
void check_size(const SampleKeys& keys, const Family& family, const MediaSize& size);

/// What `request` asks of a model on `devices` devices; scope and compile are the caller's. `scheduler_config`: the
/// text of scheduler_config.json. Throws invalid_config, for numbers of texts or images, sizes, steps, samplers,
/// latents, caches and a ControlNet's part, before anything is computed.
SampleOptions sample_options(const SampleRequest& request, const Family& family, const std::string& scheduler_config,
                             const SampleBatch& batch, int64_t devices);
/// Samples of a run of the program: at least one for each device.
int64_t sampling_batch(const SampleBatch& batch, int64_t devices);

}  // namespace md
