// LoRA training as a variation of scopes: y = f(x, W) + alpha/r · B·f(x, A), with W frozen. A layer's product runs
// beside the weight's, on thin matrices, so neither B·A nor the gradient of W is ever made, and small steps of B are
// not rounded away next to W when activations are bf16.
// Sources: Hu et al. 2021; PEFT 0.21 (names, matching of targets, starting values).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

struct LoraConfig {
  int64_t rank = 4;
  double alpha = 4;
  /// Ends of module paths, beginning at a dot: "to_q", "to_out.0", "resnets.0.conv1".
  std::vector<std::string> targets;
};

/// Everything below is frozen; linear and convolution layers that a target names get trainable f32 parameters
/// `lora_A.weight` [r, in(, k, k)], uniform in ±1/√fan_in, and `lora_B.weight` [out, r(, 1, 1)], zeros.
Scope lora_scope(const Scope& s, const LoraConfig& config);

/// Throws invalid_config naming the targets by which no module of any model in the table got matrices.
void check_lora_targets(const std::vector<std::string>& targets, const ParamTable& params);

bool is_lora(const Param& p);
/// The table without LoRA parameters: what a model folder has values for.
ParamTable base_params(const ParamTable& params);

/// Starting values of the table's LoRA parameters by input name, as a training state holds them; drawn from the seed.
HostArrays initial_lora(const ParamTable& params, uint64_t seed);
/// Starting values from the matrices of a file. Throws io where the file has other modules than the table,
/// invalid_config where its rank or alpha is not the config's, or where it has differences; all say what to change.
HostArrays initial_lora(const ParamTable& params, const LoraFile& file, const LoraConfig& config);
/// The matrices in a training state, under published names.
LoraFile trained_lora(const ParamTable& params, const HostArrays& values, const LoraConfig& config);

}  // namespace md
