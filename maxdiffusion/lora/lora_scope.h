// LoRA training as a variation of scopes: y = f(x, W) + alpha/r · B·f(x, A), with W frozen. The low-rank product is
// added to the layer's output, so neither B·A nor the gradient of W is computed, and small updates of B are not lost
// next to W when activations are bf16. Sources: Hu et al. 2021; PEFT 0.21 (names, matching of targets, initial values).
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
  /// Suffixes of module paths, from a dot on: "to_q", "to_out.0", "resnets.0.conv1".
  std::vector<std::string> targets;
};

/// Freezes all parameters; linear and convolution layers that match a target get trainable f32 parameters
/// `lora_A.weight` [r, in(, k, k)], uniform in ±1/√fan_in, and `lora_B.weight` [out, r(, 1, 1)], zeros.
Scope lora_scope(const Scope& s, const LoraConfig& config);

/// Throws invalid_config naming targets that match no module of any model in the table.
void check_lora_targets(const std::vector<std::string>& targets, const ParamTable& params);

bool is_lora(const Param& p);
/// The table without LoRA parameters, as in model folders.
ParamTable base_params(const ParamTable& params);

/// Initial values of the LoRA parameters by input name, from the seed.
HostArrays initial_lora(const ParamTable& params, uint64_t seed);
/// Initial values from a LoRA file. Throws io if its modules differ from the table, invalid_config if its rank or alpha
/// differ from the config or it has full-rank differences.
HostArrays initial_lora(const ParamTable& params, const LoraFile& file, const LoraConfig& config);
/// The matrices in a training state, under published names.
LoraFile trained_lora(const ParamTable& params, const HostArrays& values, const LoraConfig& config);

}  // namespace md
