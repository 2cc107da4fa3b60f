// Image generation: the command `generate`, from a model folder or a trained run, and samples during training.
#pragma once

#include <string>

#include "maxdiffusion/commands/plan_generate.h"
#include "maxdiffusion/run/model_components.h"

namespace md {

/// Keyword of the PNG text chunk that `generate` reads: keys as YAML.
inline constexpr const char* kImageSettings = "maxdiffusion";

/// Generates the requested samples into the folder of their GeneratePlan. Existing files are kept.
void generate(const GenerateRequest& request, const GenerateOptions& options = {});

/// Sampling options of the keys for `devices` devices, without a ControlNet. Throws invalid_config, and io for files
/// that the keys name.
SampleOptions planned_sampling(const ModelComponents& models, const SamplingRequest& sampling, int64_t devices);

/// Checks the keys and the files that they name before anything is computed. Throws the errors that sample_images
/// would.
void check_samples_of_run(const ModelComponents& models, const SamplingRequest& sampling);

/// DreamBooth: generates class images with class_prompt, 50 steps and guidance 7.5 until class_data_dir has
/// num_class_images.
void generate_class_images(const TrainingRequest& request);

/// Samples media of the prompts with the models of a run that is training: f32 [N, (F,) H, W, 3] in [−1, 1], one for
/// each prompt unless a key sets the number. `weights`: of the denoiser.
HostArray sample_images(ModelComponents& models, const SamplingRequest& sampling, TextEncoder& text,
                        const WeightsOf& weights);
/// Writes the media of sample_images as a grid with captions, `path`.png, and returns the grid. Videos are also written
/// as MP4 files, `path`_0.mp4, ….
HostArray write_sample_grid(const SamplingRequest& sampling, const HostArray& media, const std::string& path);

}  // namespace md
