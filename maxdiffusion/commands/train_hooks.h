// What a training run does between steps and at its ends: evaluation and samples.
#pragma once

#include "maxdiffusion/run/train_plan.h"

namespace md {

/// Evaluation and samples on the way. `models` and `plan` must outlive them.
std::vector<Hook> train_hooks(ModelComponents& models, const TrainPlan& plan);
/// With enable_ssim: media of the prompts before training; otherwise nothing.
HostArray samples_before(ModelComponents& models, const TrainPlan& plan);
/// The samples after the last step, where the plan has any; with `before` how much training changed the first.
void write_last_samples(ModelComponents& models, const TrainPlan& plan, const Trained& trained,
                        const HostArray& before);

}  // namespace md
