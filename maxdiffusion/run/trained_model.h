// The weights of a training run: what it starts from, what it samples with, and what else its checkpoints hold.
#pragma once

#include "maxdiffusion/run/train_plan.h"

namespace md {

/// Values of all parameters of the step before the first one, made when the result is called; `params` must live until
/// then. Throws io now where weights or layers are not there.
std::function<NamedShards()> initial_values(ModelComponents& models, const TrainPlan& plan, const ParamTable& params);
/// Adds what makes a checkpoint a whole model folder and, of LoRA, files in the layouts of other programs.
void complete_checkpoint(ModelComponents& models, const TrainPlan& plan, CheckpointContent& content,
                         const ParamTable& params, const NamedShards& trained);
/// The models' weights with what has been trained: whole components, or LoRA merged into them.
WeightsOf weights_with(ModelComponents& models, const TrainPlan& plan, const ParamTable& params,
                       const HostArrays& trained);

}  // namespace md
