// Generating images: as a command, with a model folder or with what a run has trained, and while a run trains.
#pragma once

#include <string>

#include "maxdiffusion/commands/plan_generate.h"
#include "maxdiffusion/run/model_components.h"

namespace md {

/// Generates the samples of the keys into the folder of their plan. Existing files stay.
void generate(const GenerateRequest& request, const GenerateOptions& how = {});

/// Options of the keys for sampling on `devices` devices, without a ControlNet. Throws invalid_config; io for files
/// that they name.
SampleOptions planned_sampling(const ModelComponents& models, const SamplingRequest& sampling, int64_t devices);

/// Throws what sample_images would of the keys and the files that they name, before anything is computed.
void check_samples_of_run(const ModelComponents& models, const SamplingRequest& sampling);

/// DreamBooth: generates the images that class_data_dir lacks of num_class_images, with class_prompt, 50 steps and
/// guidance 7.5.
void generate_class_images(const TrainingRequest& request);

/// Media of the prompts, sampled with the models of a run that is training: f32 [N, (F,) H, W, 3] in [−1, 1], one of
/// each prompt where no key says how many. `weights`: of the denoiser.
HostArray sample_images(ModelComponents& models, const SamplingRequest& sampling, TextEncoder& text,
                        const WeightsOf& weights);
/// Writes such media as a grid with captions, `path`.png, which it returns, and where they are videos as MP4 files,
/// `path`_0.mp4, ….
HostArray write_sample_grid(const SamplingRequest& sampling, const HostArray& media, const std::string& path);

}  // namespace md
