// Configuration keys of LoRA. The mapping `lora_config` is MaxDiffusion's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/lora/lora_scope.h"

namespace md {

struct LoraKeys {
  std::vector<std::string> lora_files, lora_target_modules;
  std::vector<double> lora_scales;
  std::map<std::string, std::string> lora_config;
  std::string lora_init;
  bool enable_lora = true, train_lora = false;
  int64_t lora_rank = 4;
  std::optional<double> lora_alpha;
  template <class V>
  void visit(V&& v) {
    visit_files(v);
    v("train_lora", train_lora, "train low-rank matrices (LoRA), with the weights frozen");
    v("lora_rank", lora_rank, "rank of the trained matrices");
    v("lora_alpha", lora_alpha, "B·A is multiplied by lora_alpha / lora_rank; null: by 1");
    v("lora_target_modules", lora_target_modules,
      "ends of the names of the layers that get matrices; a list, or one text with commas; empty: attention "
      "projections, and feed-forward layers for some families");
    v("lora_init", lora_init,
      "LoRA file whose matrices training starts from; empty: random A, zero B. An alpha in the file must be lora_alpha",
      KeyPath::input);
  }
  /// Those of files that are added to weights, which are all that does not train.
  template <class V>
  void visit_files(V&& v) {
    v("lora_files", lora_files, "LoRA files or folders added to the weights; a list, or one text with commas",
      KeyPath::input_or_word);
    v("lora_scales", lora_scales, "factor of each of lora_files; empty: 1");
    v("lora_config", lora_config,
      "LoRA files as lists: lora_model_name_or_path, weight_name (with two denoisers: high_noise_weight_name, "
      "low_noise_weight_name), adapter_name, rank, scale, from_pt");
    v("enable_lora", enable_lora, "false: lora_config is ignored");
  }
};

struct LoraChoice {
  std::string path;  // of a .safetensors file
  double scale = 1;
  std::optional<size_t> denoiser = {};  // index, from high noise to low noise; none: from the file, else the first
};
/// The files to add, in order: those of lora_config, then lora_files. A folder means its
/// pytorch_lora_weights.safetensors, a Hugging Face name its cached folder. Throws invalid_config for lists of
/// different lengths, unknown fields, from_pt=false and pickled files; io if a path does not exist.
std::vector<LoraChoice> chosen_loras(const LoraKeys& keys);
/// The LoRA settings of one component; `targets` (FamilySpec::lora_targets) is the default of lora_target_modules.
/// Throws invalid_config for a rank or alpha that is not positive.
LoraConfig training_lora(const LoraKeys& keys, const std::vector<std::string>& targets);

}  // namespace md
