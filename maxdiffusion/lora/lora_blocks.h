// A model's blocks, each with a factor of its own for LoRA matrices. Order and numbers of UNets and of FLUX.1 are those
// of sd-webui-lora-block-weight; those of other transformers are the text encoder and then every block.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/lora/lora_targets.h"
#include "maxdiffusion/nn/param.h"

namespace md {

class LoraBlocks {
 public:
  /// `with_ends`: each text encoder, and the layers before and behind a transformer's blocks, are blocks, too.
  LoraBlocks(const ParamTable& params, const LoraNames& names, const std::vector<std::string>& text_encoders,
             bool with_ends);
  /// Component → published path → factor. `list`: one number for each block, or of UNets for each with attention, the
  /// others being 0; or the name of a preset, as OUTALL. Layers outside of blocks have 1. Throws invalid_config with
  /// the numbers of weights that are expected.
  std::map<std::string, std::map<std::string, double>> factors(const std::string& list) const;

 private:
  void add(const std::string& component, const std::string& path, const std::string& block);

  std::vector<std::string> blocks_, attending_;                         // attending_: of UNets
  std::map<std::string, std::map<std::string, std::string>> block_of_;  // component → path → block; "": none
};

}  // namespace md
