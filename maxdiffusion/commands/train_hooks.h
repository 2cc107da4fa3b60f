// Evaluation and samples between the steps of a training run, and before and after it.
#pragma once

#include "maxdiffusion/run/train_plan.h"

namespace md {

/// The hooks for evaluation and samples during training. `models` and `plan` must outlive them.
std::vector<Hook> train_hooks(ModelComponents& models, const TrainPlan& plan);
/// With enable_ssim: media of the prompts before training; otherwise nothing.
HostArray samples_before(ModelComponents& models, const TrainPlan& plan);
/// Writes the samples after the last step, if the plan has any. If `before` is not empty, also logs how much training
/// changed the first sample.
void write_last_samples(ModelComponents& models, const TrainPlan& plan, const Trained& trained,
                        const HostArray& before);

}  // namespace md
