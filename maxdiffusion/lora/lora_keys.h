// Configuration keys of LoRA. The mapping `lora_config` is MaxDiffusion's.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/base/step_range.h"
#include "maxdiffusion/lora/lora_file.h"
#include "maxdiffusion/lora/lora_scope.h"

namespace md {

/// Values of lora_missing_keys, in the order of MissingKeys.
inline constexpr const char* kMissingKeys[] = {"error", "warn"};

struct LoraKeys {
  std::vector<std::string> lora_files, lora_target_modules;
  std::vector<double> lora_scales, lora_text_scales;
  std::vector<std::string> lora_block_weights, lora_steps;
  std::map<std::string, std::string> lora_config;
  std::string lora_init, lora_missing_keys = kMissingKeys[0];
  bool enable_lora = true, train_lora = false;
  std::string adapter = "lora";
  int64_t lora_rank = 4;
  std::optional<double> lora_alpha;
  bool use_rslora = false;
  std::map<std::string, std::string> rank_pattern, alpha_pattern;
  std::optional<int64_t> conv_dim;
  std::optional<double> conv_alpha;
  double lora_dropout = 0, rank_dropout = 0, module_dropout = 0;
  int64_t decompose_factor = -1;
  bool decompose_both = false;
  std::vector<std::string> feedforward_modules;
  template <class V>
  void visit(V&& v) {
    visit_files(v);
    v("train_lora", train_lora, "train low-rank matrices (LoRA), with the weights frozen");
    v("adapter", adapter, "what train_lora trains next to each layer's weight", one_of(adapter_names()));
    v("lora_rank", lora_rank, "rank of the trained matrices");
    v("lora_alpha", lora_alpha, "B·A is multiplied by lora_alpha / lora_rank; null: by 1");
    v("use_rslora", use_rslora, "B·A is multiplied by lora_alpha / √lora_rank");
    v("rank_pattern", rank_pattern,
      "rank by expression of the ends of layers' names, as PEFT matches them; the first in alphabetical order counts");
    v("alpha_pattern", alpha_pattern, "lora_alpha likewise");
    v("conv_dim", conv_dim,
      "rank of convolutions larger than one pixel; adds the layers of resnets, downsamplers and upsamplers (kohya's "
      "LoCon); null: convolutions that are targets have lora_rank",
      at_least(1));
    v("conv_alpha", conv_alpha, "lora_alpha of these convolutions; null: conv_dim", at_least(above(0)));
    v("lora_dropout", lora_dropout, "probability with which an element of an adapter's input is dropped",
      in_range(0, below(1)));
    v("rank_dropout", rank_dropout,
      "of loha, lokr and full: probability with which a row of the change is dropped; else of an element of rank",
      in_range(0, below(1)));
    v("module_dropout", module_dropout, "probability with which a layer's adapter is dropped in a step",
      in_range(0, below(1)));
    v("decompose_factor", decompose_factor,
      "lokr: first factor of a weight's sizes that it divides; -1: the two factors nearest to each other");
    v("decompose_both", decompose_both,
      "lokr: the first factor is a product of matrices, too, where the rank is small");
    v("feedforward_modules", feedforward_modules,
      "ia3: ends of the names of the layers whose input is scaled, not their result; a list, or one text with commas");
    v("lora_target_modules", lora_target_modules,
      "ends of the names of the layers that get matrices; a list, or one text with commas; empty: attention "
      "projections, and feed-forward layers for some families");
    v("lora_init", lora_init,
      "LoRA file or folder whose matrices training starts from; empty: random A, zero B. An alpha in the file must be "
      "lora_alpha",
      KeyPath::input_or_word);
  }
  /// The keys of LoRA files that are merged into weights; commands that do not train have only these.
  template <class V>
  void visit_files(V&& v) {
    v("lora_files", lora_files, "LoRA files or folders added to the weights; a list, or one text with commas",
      KeyPath::input_or_word);
    v("lora_scales", lora_scales, "factor of each of lora_files; empty: 1");
    v("lora_text_scales", lora_text_scales, "the same for the text encoders; empty: lora_scales");
    v("lora_block_weights", lora_block_weights,
      "factor of each block, as lbw= in prompts, such as 1,0,0,… or OUTALL; of several lora_files a list of texts, or "
      "one with semicolons; empty: 1");
    v("lora_steps", lora_steps,
      "steps in which each of lora_files acts, the ends counted as in prompts: 5-10, 0.2-0.8, 10- (to the end), -10; a "
      "list, or one text with commas; empty: all");
    v("lora_config", lora_config,
      "LoRA files as lists: lora_model_name_or_path, weight_name (with two denoisers: high_noise_weight_name, "
      "low_noise_weight_name), adapter_name, rank, scale, from_pt");
    v("enable_lora", enable_lora, "false: lora_config is ignored");
    visit_missing_keys(v, lora_missing_keys);
  }
  /// The key that says what happens to keys of a LoRA file that the model has no place for.
  template <class V>
  static void visit_missing_keys(V&& v, std::string& value) {
    v("lora_missing_keys", value,
      "keys of a LoRA file that the model has no place for: error, or warn, which leaves them out",
      one_of({kMissingKeys[0], kMissingKeys[1]}));
  }
};

struct LoraChoice {
  std::string path;  // of a .safetensors file
  double scale = 1;
  std::optional<size_t> denoiser = {};    // index, from high noise to low noise; none: from the file, else the first
  std::optional<double> text_scale = {};  // of the text encoders; none: scale
  std::string block_weights = {};         // LoraBlocks::factors
  StepRange steps = {};
};
/// What a value of lora_missing_keys means.
MissingKeys missing_keys(const std::string& value);
/// The file that a path of a LoRA means: of a folder its pytorch_lora_weights.safetensors, else
/// adapter_model.safetensors, else its only .safetensors file; a Hugging Face name means its cached folder. Throws
/// invalid_config for a folder of several files and for pickled files; io if there is none.
std::string lora_file(const std::string& path);
/// Names what lora_files and the lists next to it add: equal texts, equal files, scales and steps.
std::string text_of_files(const LoraKeys& keys);
/// The files to add, in order: those of lora_config, then lora_files; each is lora_file of what the keys name. Throws
/// invalid_config for lists of different lengths, unknown fields, from_pt=false and pickled files; io if a path does
/// not exist.
std::vector<LoraChoice> chosen_loras(const LoraKeys& keys);
/// The LoRA settings of one component; `targets` (FamilySpec::lora_targets) is the default of lora_target_modules.
/// Throws invalid_config for a rank or alpha that is not positive, for a pattern that is no regular expression, and for
/// keys that the kind of adapter does not read.
LoraConfig training_lora(const LoraKeys& keys, const std::vector<std::string>& targets);

}  // namespace md
