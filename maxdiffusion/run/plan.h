// What a run would do, before its data is read: the task, what is trained, how the optimizer moves it.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/run/run_models.h"
#include "maxdiffusion/tasks/denoise.h"
#include "maxdiffusion/train/step.h"

namespace md {

/// The task that the keys ask for, at all times, with the part of the batch over `devices` devices that each of the
/// replicas has. Sizes that follow from the data are `resolution` here.
DenoiseTask planned_task(const RunConfig& config, std::shared_ptr<const Family> family,
                         const nlohmann::json& scheduler_config, int64_t devices, int64_t replicas = 1);
/// The components that are trained, of FamilySpec::denoisers: the only one, or those that train_expert names.
std::vector<std::string> trained_denoisers(const RunConfig& config, const Family& family);
/// A task for each of them, on its part of the times.
std::vector<DenoiseTask> of_experts(const RunConfig& config, const DenoiseTask& task);
/// Whether any part of a component is trained.
bool is_trained(const RunModels& models, const std::string& component);
/// How an update of `samples` samples is made. `models` must outlive the result.
StepOptions planned_step(const RunModels& models, int64_t samples);
/// What is trained on `devices` devices, and how: a task, or one of each expert. Throws what a config cannot mean,
/// before anything is written.
struct PlannedTraining {
  std::vector<DenoiseTask> tasks;
  StepOptions step;
};
PlannedTraining planned_training(const RunModels& models, int64_t devices, int64_t replicas = 1);
/// `rate`, with `scale_lr` multiplied by the samples of an update.
double scaled_rate(const OptimConfig& optim, double rate, int64_t samples);

/// What a run generates from its prompts while it trains.
struct SamplePlan {
  int64_t every = 0;                                // steps between sample grids; -1: after the last step; 0: none
  bool after_evaluation = false, compares = false;  // enable_generate_video_for_eval, enable_ssim
};
/// None: nothing, or not by this process.
std::optional<SamplePlan> planned_samples(const RunConfig& config, const RunInfo& run);

/// Prints one stage's value to standard output. `what`: mesh, params, batch, graph, program or memory. Throws
/// invalid_config for another.
void inspect(const std::string& what, const RunConfig& config);

}  // namespace md
