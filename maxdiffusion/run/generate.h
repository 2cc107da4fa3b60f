// Drawing: with a model folder or what a run has trained, while training and as a command.
#pragma once

#include <string>

#include "maxdiffusion/lora/lora_targets.h"
#include "maxdiffusion/run/run_models.h"

namespace md {

/// Draws what the keys ask for into output_dir. `with_control`: a ControlNet must be there. The model is the one given
/// on the command line, else the newest checkpoint of the run, else the config's.
void generate(const RunConfig& config, bool with_control = false);

/// DreamBooth: draws what class_data_dir lacks of num_class_images with class_prompt, 50 steps and guidance 7.5.
void draw_class_images(const RunConfig& config);

/// A grid of the prompts' samples with the models of a run that is training, with their captions. `weights`: of the
/// denoiser. Returns the path of the PNG, `folder`/step_NNNNNN.png.
std::string draw_sample_grid(RunModels& models, TextEncoder& text, const WeightsOf& weights, int64_t step,
                             const std::string& folder);

/// The weights of a run's models that LoRA matrices can sit on.
LoraTargets lora_targets(const RunModels& models);

}  // namespace md
