// The parameters that LoRA files can change, found by every name that files give them. The names are made from the
// models' own parameter tables. Sources: diffusers 0.42, loaders/lora_conversion_utils.py and
// utils/state_dict_utils.py.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/nn/param.h"

namespace md {

struct LoraTarget {
  std::string component;  // "unet", "text_encoder", "text_encoder_2"
  std::string path;       // published: "down_blocks.0.resnets.0.conv1.weight"
  Dims dims;              // of one layer: [out, in], [out, in, k, k], [features], …
};

/// What matrices under a file's name are for: one parameter, or several that are one in the file.
struct LoraPlace {
  const LoraTarget* target = nullptr;
  std::vector<int64_t> part = {0};  // the target's of the equal parts of the file's rows, in the target's order
  int64_t parts = 1;
};

/// What files call a family's models and parameters, beside the published names.
struct LoraNames {
  /// FamilySpec::denoisers. Names that say no component, or only that it is the denoiser, mean the first of them unless
  /// something else says which.
  std::vector<std::string> denoisers;
  /// ModelClass::weight_names of components that have any.
  std::map<std::string, WeightNameMap> others = {};
};

class LoraTargets {
 public:
  /// Every parameter of every model in the table; of a stacked one, each layer.
  LoraTargets(const ParamTable& params, LoraNames names);
  /// The parameter called `name` ("mid_block.attentions.0.proj_in.weight") in a component. An empty component means
  /// any, of the denoisers only `denoiser`. Several where they are parts of what has this name. Empty where there is
  /// none, or in more than one component. '.' and '_' are not told apart. Understands diffusers' names, those of
  /// LoraNames ("middle_block.1.proj_in.weight") and older names of attention's projections.
  std::vector<LoraPlace> find(const std::string& component, std::string name, const std::string& denoiser) const;
  std::vector<std::string> components() const;
  const std::vector<std::string>& denoisers() const { return names_.denoisers; }

 private:
  LoraNames names_;
  std::vector<LoraTarget> targets_;
  struct Place {
    size_t target;
    std::vector<int64_t> part;
    int64_t parts;
  };
  /// `target` of `component` is called `name`, or is a part of what is.
  void add(const std::string& component, const std::string& name, Place place);

  std::map<std::string, std::map<std::string, std::vector<Place>>> by_name_;  // component → name with '_' → parameters
};

/// "a.b.c" → "a_b_c".
std::string underscored(std::string name);

}  // namespace md
