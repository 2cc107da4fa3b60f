// Adapter training as a variation of scopes: layers that match a target get trained parameters next to their weight,
// which is frozen. What they compute is the kind's (adapter.h). Source: PEFT 0.21 (names, matching of targets).
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/lora/layer_pattern.h"
#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/lora/lora_metadata.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

struct LoraConfig {
  int64_t rank = 4;
  double alpha = 4;
  /// Suffixes of module paths, from a dot on: "to_q", "to_out.0", "resnets.0.conv1".
  std::vector<std::string> targets;
  const Adapter* kind = adapters()[0];
  /// The first that matches says a layer's rank, or alpha.
  std::vector<std::pair<LayerPattern, int64_t>> ranks = {};
  std::vector<std::pair<LayerPattern, double>> alphas = {};
  /// Of convolutions larger than one pixel; 0: as of other layers. Adds the layers of kohya's LoCon to the targets:
  /// those in resnets, downsamplers and upsamplers.
  int64_t conv_rank = 0;
  double conv_alpha = 0;
  bool rank_stabilized = false;                // scaled by alpha / √rank
  int64_t factor = -1;                         // lokr
  bool decompose_both = false;                 // lokr
  std::vector<std::string> input_scaled = {};  // ia3: layers whose input is scaled, as targets name them
  double input_dropout = 0, rank_dropout = 0, module_dropout = 0;

  bool is_target(const std::string& module) const;
  /// Of a layer with a weight of `dims`. alpha is the one that files hold: the change is scaled by alpha / rank.
  LoraStrength strength(const std::string& module, const Dims& dims) const;
  bool drops() const { return input_dropout > 0 || rank_dropout > 0 || module_dropout > 0; }
};

/// Freezes all parameters; linear and convolution layers that match a target get the kind's parameters, f32.
Scope lora_scope(const Scope& s, const LoraConfig& config);

/// Throws invalid_config naming targets, expressions of ranks and alphas, and conv_rank, that match no layer of any
/// model in the table; and stacked layers whose values differ.
void check_lora_targets(const std::vector<std::string>& targets, const LoraConfig& config, const ParamTable& params);

/// A parameter of an adapter of any kind.
bool is_lora(const Param& p);
/// Whether `p`, a LoRA parameter, is lora_B.
bool is_second_lora_matrix(const Param& p);
/// The table without LoRA parameters, as in model folders.
ParamTable base_params(const ParamTable& params);

/// Initial values of the adapters' parameters by input name, from the seed; DoRA's magnitudes are not in it.
HostArrays initial_lora(const ParamTable& params, uint64_t seed);
/// DoRA's magnitudes, which start as the lengths of the weights' rows. `value`: of a parameter of the base, by input
/// name, as it is stored.
HostArrays initial_magnitudes(const ParamTable& params,
                              const std::function<HostArray(const std::string& input)>& value);
/// Initial values from a file. Throws io if its modules differ from the table, invalid_config if its kind, rank or
/// alpha differ from the config or it holds what is not trained.
HostArrays initial_lora(const ParamTable& params, const LoraFile& file, const LoraConfig& config);
/// The adapters in a training state, under published names.
LoraFile trained_lora(const ParamTable& params, const HostArrays& values, const LoraConfig& config);

}  // namespace md
