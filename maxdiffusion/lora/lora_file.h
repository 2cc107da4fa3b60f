// LoRA files: pairs of low-rank matrices for a model's weights, W + alpha/r · up·down, and adapters of other kinds
// (adapter.h). Reads the layouts of all common trainers; writes those of diffusers, PEFT, kohya, LyCORIS and ComfyUI.
// Sources: Hu et al. 2021 (LoRA); diffusers 0.42 (loaders/lora_base.py, utils/peft_utils.py); PEFT (LoraConfig);
// kohya-ss sd-scripts (networks/lora.py).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/lora/adapter.h"
#include "maxdiffusion/lora/lora_targets.h"

namespace md {

struct LoraPair {
  HostArray down;             // [r, in] or [r, in, k, k], any float type
  HostArray up;               // [out, r] or [out, r, 1, 1]
  double alpha = 0;           // as in PEFT and kohya: the product is scaled by alpha / r
  bool alpha_in_file = true;  // the file holds alpha; false: alpha is the rank
  int64_t rank() const { return down.dims()[0]; }
};

struct LoraFile {
  std::string name;  // for messages: its file
  /// Component ("unet") → published path of the weight ("mid_block.attentions.0.proj_in.weight") → matrices.
  std::map<std::string, std::map<std::string, LoraPair>> pairs;
  /// Component → path → full-rank difference of the parameter's shape.
  std::map<std::string, std::map<std::string, HostArray>> differences;
  /// Component → path → the parts of dora, loha, lokr and ia3.
  std::map<std::string, std::map<std::string, AdapterWeights>> adapters = {};

  /// Puts a weight's adapter where its kind is kept.
  void add(const std::string& component, const std::string& path, AdapterWeights weights);
  /// All of them as adapters: component → path of the weight. Differences of biases are of kind full, too.
  std::map<std::string, std::map<std::string, AdapterWeights>> all() const;
  /// As all(), without those of kind lora.
  std::map<std::string, std::map<std::string, AdapterWeights>> others() const;
  /// Whether it changes this weight.
  bool has(const std::string& component, const std::string& path) const;
  void erase(const std::string& component);
};

/// Beginning of the keys of learned embeddings in a LoRA file: "bundle_emb.WORD.clip_l" (OneTrainer, the web UI's
/// bundles).
inline constexpr char kBundledEmbeddings[] = "bundle_emb.";

/// Numbers of matrices and differences by component, for the log.
std::string summary(const LoraFile& lora);

/// What happens to keys of a file for which the model has no place.
enum class MissingKeys { refused, left_out };

/// Reads a .safetensors file in any of these layouts, whose keys may be mixed:
///   diffusers   unet.….attn1.processor.to_q_lora.down.weight, unet.….lora.up.weight,
///               text_encoder.….lora_linear_layer.down.weight
///   PEFT        unet.….lora_A.weight, base_model.model.….lora_B.default.weight, with or without a component's name
///   kohya       lora_unet_….lora_down.weight and .alpha, lora_te_…, lora_te1_…, lora_te2_…, with diffusers' or with
///               the original model's names
///   XLabs       double_blocks.0.processor.qkv_lora1.down.weight
///   ComfyUI     diffusion_model.….lora_up.weight or .lora_B.weight, with the original model's names
/// alpha: the file's own, with a warning where the metadata differs; else lora_alpha of its metadata
/// (`lora_adapter_metadata` of diffusers, or adapter_config.json of PEFT's adapter_model.safetensors) with
/// alpha_pattern and use_rslora, or lora_alpha, network_alpha, alpha or ss_network_alpha there; else, and where kohya's
/// is 0, the rank. Left out with a warning, as diffusers does: fused matrices next to those of their parts, and keys of
/// an image input that the model lacks. Matrices get the rank of their target's dims (1×1 convolutions are linear
/// layers, and down matrices of others may be flat). The suffix .diff is a difference of a module's weight, .diff_b of
/// its bias, .diff_m of its modulation. A tensor of the original model that is several weights in diffusers is split,
/// each with its part of the rank. Arrays borrow the memory map. LyCORIS' and PEFT's names of dora, loha, lokr and ia3
/// have the same beginnings; matrices of LoCon's with a core tensor become plain ones. With several denoisers, names
/// without a component, or with the first one's, refer to `denoiser`; if it is empty, to `component` of the file's
/// metadata, else to the first. Keys that are unknown or have no target are listed: by an error, or where they are left
/// out by a warning. Throws io for them, for a file of which no key has a place, for incomplete pairs, and with both
/// shapes of mismatches; invalid_config for quantized matrices, for OFT, for core tensors of LoHa and LoKr, and for
/// PEFT options that change the formula.
LoraFile read_lora(const std::string& path, const LoraTargets& targets, const std::string& denoiser = "",
                   MissingKeys missing = MissingKeys::refused);

/// A pair of matrices under the file's names, for tools without the model.
struct NamedPair {
  std::string module;                       // prefix of the keys
  std::string down_key, up_key, alpha_key;  // alpha_key is empty if the pair has none
  LoraPair pair;
};
struct LoraContents {
  std::vector<NamedPair> pairs;
  HostArrays others;  // tensors outside pairs
  std::map<std::string, std::string> metadata;
};
/// Throws as read_lora does for incomplete pairs, and invalid_config for methods other than LoRA.
/// `any_kind`: tensors of other methods are among `others`, and there may be no pairs.
LoraContents read_lora_contents(const std::string& path, bool any_kind = false);
/// Adds new matrices under the keys of `old`. Without a key for alpha, scales `up` so that alpha is the rank.
void put_pair(const NamedPair& old, const LoraPair& pair, HostArrays& out);

/// Throws io naming both shapes, unless the pair's product has `dims` (of a weight: [out, in] or [out, in, k, k]).
void check_fits(const LoraPair& pair, const Dims& dims, const std::string& name);

/// In the layout of diffusers' save_lora_weights: unet.….lora_A.weight, alpha in the metadata. With several denoisers,
/// keys use the first one's name, which diffusers loads into any; `component` of the metadata names the denoiser.
/// `folder` gets pytorch_lora_weights.safetensors, whose path is returned; empty where diffusers reads no file of these
/// kinds of adapters: it reads lora, dora and lokr.
std::string write_peft_lora(const std::string& folder, const LoraFile& lora, const LoraNames& names);
/// In PEFT's layout, for loha, lokr and ia3: peft/COMPONENT/adapter_model.safetensors and adapter_config.json in
/// `folder`.
void write_peft_folders(const std::string& folder, const LoraFile& lora);
/// In kohya's layout, which LyCORIS' is for other kinds than lora: with original names if LoraNames has them without a
/// prefix (weights of one original tensor become one pair), else with diffusers' block names. `two_text_encoders`: the
/// first is lora_te1, else lora_te. `metadata` is added to the file, with ss_network_module, ss_network_dim and
/// ss_network_alpha of these matrices.
void write_kohya_lora(const std::string& path, const LoraFile& lora, const LoraNames& names, bool two_text_encoders,
                      const std::map<std::string, std::string>& metadata = {});
/// In ComfyUI's layout: diffusion_model.….lora_A.weight and .alpha, with the original names, as in write_kohya_lora.
/// Only the denoiser; `component` of the metadata as in write_peft_lora.
void write_comfyui_lora(const std::string& path, const LoraFile& lora, const LoraNames& names);

}  // namespace md
