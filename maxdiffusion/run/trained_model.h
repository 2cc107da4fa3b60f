// The weights of a training run: initial values, weights for sampling, and files that complete checkpoints.
#pragma once

#include "maxdiffusion/run/train_plan.h"

namespace md {

/// Throws invalid_config if a component is trained, other than by LoRA or for an embedding, and its files have few
/// bits.
void check_trained_weights(const ModelComponents& models, const TrainPlan& plan);
/// Initial values of all parameters of the training step, created when the result is called; `params` must live until
/// then. Throws io immediately if weights or layers are missing.
std::function<NamedShards()> initial_values(ModelComponents& models, const TrainPlan& plan, const ParamTable& params);
/// Checks what a run needs from its models and its newest checkpoint before its first step: names and shapes of
/// weights, LoRA files, and that the run may continue from the checkpoint. Reads headers; writes nothing. Collective.
/// `title`: of the log lines; empty: none. Returns and throws as check_resumes; throws as initial_values.
std::optional<StateInfo> check_start(ModelComponents& models, const TrainPlan& plan, const std::string& title = "");
/// Adds the files that make a checkpoint a complete model folder and, for LoRA, files in other programs' layouts.
void complete_checkpoint(ModelComponents& models, const TrainPlan& plan, CheckpointContent& content,
                         const ParamTable& params, const NamedShards& trained);
/// The models' weights with the trained ones: whole components, or LoRA merged into the weights.
WeightsOf weights_with(ModelComponents& models, const TrainPlan& plan, const ParamTable& params,
                       const HostArrays& trained);

}  // namespace md
