// The weights that LoRA matrices can sit on, found by every name that files give them. The names are made from the
// models' own parameter tables. Sources: diffusers 0.42, loaders/lora_conversion_utils.py and
// utils/state_dict_utils.py; CompVis latent-diffusion, openaimodel.py (block names of the original models).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/nn/param.h"

namespace md {

struct LoraTarget {
  std::string component;  // "unet", "text_encoder", "text_encoder_2"
  std::string path;       // published: "down_blocks.0.resnets.0.conv1.weight"
  Dims dims;              // [out, in] or [out, in, k, k]
};

class LoraTargets {
 public:
  LoraTargets() = default;
  explicit LoraTargets(const ParamTable& params) { add(params); }
  /// Every weight of two or four dims of every model in the table; of a stacked one, each layer.
  void add(const ParamTable& params);
  /// The weights of the module `name`, one for each model that has it; an empty component means any. '.' and '_' are
  /// not told apart ("mid_block_attentions_0_proj_in"). Understands diffusers' names, the original model's block names
  /// ("middle_block_1_proj_in"), and older names of attention's projections.
  std::vector<const LoraTarget*> find(const std::string& component, std::string name) const;
  std::vector<std::string> components() const;

 private:
  std::map<std::string, std::map<std::string, LoraTarget>> by_name_;  // component → name with '_' → weight
};

/// "a.b.c" → "a_b_c".
std::string underscored(std::string name);

}  // namespace md
