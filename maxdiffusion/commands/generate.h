// Generating images: as a command, with a model folder or with what a run has trained, and while a run trains.
#pragma once

#include <string>

#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/run/run_models.h"

namespace md {

struct GenerateOptions {
  bool with_control = false;  // the keys must name a ControlNet
  /// As the reference's programs do: one prompt gives a whole global batch, and files are numbered from 0 in output_dir
  /// whatever is there.
  bool as_reference = false;
};
/// Generates what the keys ask for with model_to_sample (find_run.h), into the folder that it names. Files that are
/// there stay.
void generate(const RunConfig& config, const GenerateOptions& how = {});

/// How the keys ask to sample on `devices` devices; `as_reference`: see GenerateOptions. Throws invalid_config.
SampleOptions planned_sampling(const RunModels& models, int64_t devices, bool as_reference = false);

/// Throws what draw_samples would of the keys and the files that they name, before anything is computed.
void check_samples_of_run(const RunModels& models);

/// DreamBooth: generates the images that class_data_dir lacks of num_class_images, with class_prompt, 50 steps and
/// guidance 7.5.
void draw_class_images(const RunConfig& config, const RunInfo& run);

/// Media of the prompts, drawn with the models of a run that is training: f32 [N, (F,) H, W, 3] in [−1, 1], one of each
/// prompt where no key says how many. `weights`: of the denoiser.
HostArray draw_samples(RunModels& models, TextEncoder& text, const WeightsOf& weights);
/// Writes such media as a grid with captions, `path`.png, which it returns, and where they are videos as MP4 files,
/// `path`_0.mp4, ….
HostArray write_sample_grid(const RunModels& models, const HostArray& media, const std::string& path);

}  // namespace md
