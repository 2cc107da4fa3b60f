// LoRA files: pairs of thin matrices for a model's weights, W + alpha/r · up·down, from every layout that trainers
// write to one value, and from that to the layouts that everyone reads. Sources: Hu et al. 2021 (LoRA); diffusers
// 0.42 (loaders/lora_base.py, utils/peft_utils.py); PEFT (LoraConfig); kohya-ss sd-scripts (networks/lora.py).
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/lora/lora_targets.h"

namespace md {

struct LoraPair {
  HostArray down;          // [r, in] or [r, in, k, k], any float type
  HostArray up;            // [out, r] or [out, r, 1, 1]
  double alpha = 0;        // as PEFT and kohya mean it: the product counts alpha / r
  bool alpha_said = true;  // the file holds alpha; false: it was taken to be the rank
  int64_t rank() const { return down.dims()[0]; }
};

struct LoraFile {
  std::string name;  // for messages: where it came from
  /// Component ("unet") → published path of the weight ("mid_block.attentions.0.proj_in.weight") → matrices.
  std::map<std::string, std::map<std::string, LoraPair>> pairs;
  /// The same of parameters that a whole array of their own shape is added to.
  std::map<std::string, std::map<std::string, HostArray>> differences;
};

/// How many matrices and differences of which components a file holds, for the log.
std::string summary(const LoraFile& lora);

/// Reads a .safetensors file in any of these layouts, whose keys may be mixed:
///   diffusers   unet.….attn1.processor.to_q_lora.down.weight, unet.….lora.up.weight,
///               text_encoder.….lora_linear_layer.down.weight
///   PEFT        unet.….lora_A.weight, base_model.model.….lora_B.default.weight, with or without a component's name
///   kohya       lora_unet_….lora_down.weight and .alpha, lora_te_…, lora_te1_…, lora_te2_…, with diffusers' or with
///               the original model's names
///   XLabs       double_blocks.0.processor.qkv_lora1.down.weight
///   ComfyUI     diffusion_model.….lora_up.weight or .lora_B.weight, with the original model's names
/// alpha: the file's own; else lora_alpha of its metadata (`lora_adapter_metadata` of diffusers, or
/// adapter_config.json beside PEFT's adapter_model.safetensors) with alpha_pattern and use_rslora; else, and where
/// kohya's is 0, the rank. Matrices get the rank of their target's dims (1×1 convolutions are linear layers, and down
/// matrices of others may be flat). Behind a module's name .diff is a difference of its weight, .diff_b of its bias,
/// .diff_m of its modulation. What is one tensor in the original model and several weights here is taken apart, each
/// weight with the share of the rank that is its own. Arrays borrow the memory map.
/// Of several denoisers, names that say none or the first one mean `denoiser`; where that is empty, the one that the
/// file's metadata calls `component`, else the first.
/// Throws io listing every key that is not understood or has no target, naming half pairs and both shapes of those
/// that do not fit; invalid_config for DoRA, LoHa, LoKr and OFT, and for PEFT options that change the formula.
LoraFile read_lora(const std::string& path, const LoraTargets& targets, const std::string& denoiser = "");

/// A pair of matrices as a file names it, for what works on files without their model.
struct NamedPair {
  std::string module;                       // the keys' beginning
  std::string down_key, up_key, alpha_key;  // alpha_key is empty where the file has none for the pair
  LoraPair pair;
};
struct LoraContents {
  std::vector<NamedPair> pairs;
  HostArrays others;  // tensors of no pair
  std::map<std::string, std::string> metadata;
};
/// Throws as read_lora does for half pairs and methods other than LoRA.
LoraContents read_lora_contents(const std::string& path);
/// Adds new matrices under the keys of `old`. Where it has no key for alpha, up is multiplied so that alpha is the
/// rank.
void put_pair(const NamedPair& old, const LoraPair& pair, HostArrays& out);

/// Throws io naming both shapes, unless the pair's product has `dims` (of a weight: [out, in] or [out, in, k, k]).
void check_fits(const LoraPair& pair, const Dims& dims, const std::string& name);

/// As diffusers' save_lora_weights writes it: unet.….lora_A.weight, and the metadata that keeps alpha. Matrices of one
/// denoiser of several have the first one's name, by which diffusers loads them into any; `component` of the metadata
/// says whose they are. `folder` gets pytorch_lora_weights.safetensors, whose path is returned.
std::string write_peft_lora(const std::string& folder, const LoraFile& lora, const LoraNames& names);
/// As kohya's trainers and ComfyUI name it: with the original names where LoraNames has them without a prefix, weights
/// that are one tensor there as one pair, else with diffusers' block names. `two_text_encoders`: the model has two, so
/// the first is called lora_te1, else lora_te.
/// `metadata` is added to the file's, with ss_network_module, ss_network_dim and ss_network_alpha of these matrices.
void write_kohya_lora(const std::string& path, const LoraFile& lora, const LoraNames& names, bool two_text_encoders,
                      const std::map<std::string, std::string>& metadata = {});
/// As ComfyUI and most trainers name it for models that have other names: diffusion_model.….lora_A.weight and .alpha,
/// with the first of the other names, as write_kohya_lora has them. Of the denoiser alone; `component` of the metadata
/// as in write_peft_lora.
void write_comfyui_lora(const std::string& path, const LoraFile& lora, const LoraNames& names);

}  // namespace md
