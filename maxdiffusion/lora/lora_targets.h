// Lookup of the parameters that LoRA files change, by all names that files use. Names come from the models' parameter
// tables. Sources: diffusers 0.42, loaders/lora_conversion_utils.py and utils/state_dict_utils.py.
#pragma once

#include <functional>
#include <map>
#include <set>
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

/// The target of a file's matrices: one parameter, or several that are one tensor in the file.
struct LoraPlace {
  const LoraTarget* target = nullptr;
  std::vector<int64_t> part = {0};  // indices of this target's parts of the file's rows, in the target's order
  int64_t parts = 1;
};

/// Names of a family's models and parameters in files, in addition to the published ones.
struct LoraNames {
  /// FamilySpec::denoisers. Names without a component, or with a generic one, refer to the first by default.
  std::vector<std::string> denoisers;
  /// ModelClass::weight_names by component.
  std::map<std::string, WeightNameMap> others = {};
  /// Whether a tensor of a file that changes no parameter is used elsewhere, as learned embeddings are; empty: none is.
  std::function<bool(const std::string& key, const HostArray& array)> elsewhere = {};
};

class LoraTargets {
 public:
  /// Every parameter of every model in the table; for a stacked one, each layer.
  LoraTargets(const ParamTable& params, LoraNames names);
  /// The parameter called `name` ("mid_block.attentions.0.proj_in.weight") in a component. An empty component means
  /// any, of the denoisers only `denoiser`. Several if they are parts of this tensor. None if unknown or ambiguous. '.'
  /// and '_' are equivalent. Understands diffusers' names, those of LoraNames ("middle_block.1.proj_in.weight") and
  /// older names of attention's projections.
  std::vector<LoraPlace> find(const std::string& component, std::string name, const std::string& denoiser) const;
  /// Whether `name` would be found if its numbers were others: a layer of a block that this model does not have.
  bool is_of_other_block(const std::string& component, std::string name, const std::string& denoiser) const;
  std::vector<std::string> components() const;
  const std::vector<std::string>& denoisers() const { return names_.denoisers; }
  /// LoraNames::elsewhere.
  bool has_elsewhere(const std::string& key, const HostArray& array) const {
    return names_.elsewhere && names_.elsewhere(key, array);
  }

 private:
  LoraNames names_;
  std::vector<LoraTarget> targets_;
  struct Place {
    size_t target;
    std::vector<int64_t> part;
    int64_t parts;
  };
  /// Registers `name` for `target` of `component`, or for a tensor of which it is a part.
  void add(const std::string& component, const std::string& name, Place place);

  /// Whether a component of a key, "" for any, means a model.
  bool means(const std::string& component, const std::string& model, const std::string& denoiser) const;

  std::map<std::string, std::map<std::string, std::vector<Place>>> by_name_;  // component → name with '_' → parameters
  std::map<std::string, std::set<std::string>> without_numbers_;              // component → names with # for numbers
};

/// "a.b.c" → "a_b_c".
std::string underscored(std::string name);

}  // namespace md
