// LoRA files: pairs of thin matrices for a model's weights, W + alpha/r · up·down, from every layout that trainers
// write to one value, and from that to the two layouts that everyone reads. Sources: Hu et al. 2021 (LoRA); diffusers
// 0.42 (loaders/lora_base.py, utils/peft_utils.py); PEFT (LoraConfig); kohya-ss sd-scripts (networks/lora.py).
#pragma once

#include <map>
#include <string>

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
};

/// Reads a .safetensors file in any of these layouts, whose keys may be mixed:
///   diffusers   unet.….attn1.processor.to_q_lora.down.weight, unet.….lora.up.weight,
///               text_encoder.….lora_linear_layer.down.weight
///   PEFT        unet.….lora_A.weight, base_model.model.….lora_B.default.weight, with or without a component's name
///   kohya       lora_unet_….lora_down.weight and .alpha, lora_te_…, lora_te1_…, lora_te2_…, with diffusers' or with
///               the original model's block names; ComfyUI's diffusion_model.….lora_up.weight
/// alpha: the file's own; else lora_alpha of its metadata (`lora_adapter_metadata` of diffusers, or
/// adapter_config.json beside PEFT's adapter_model.safetensors) with alpha_pattern and use_rslora; else, and where
/// kohya's is 0, the rank. Matrices get the rank of their target's dims (1×1 convolutions are linear layers). Arrays
/// borrow the memory map.
/// Throws io listing every key that is not understood or has no target, naming half pairs and both shapes of those
/// that do not fit; invalid_config for DoRA, LoHa, LoKr and OFT, and for PEFT options that change the formula.
LoraFile read_lora(const std::string& path, const LoraTargets& targets);

/// Throws io naming both shapes, unless the pair's product has `dims` (of a weight: [out, in] or [out, in, k, k]).
void check_fits(const LoraPair& pair, const Dims& dims, const std::string& name);

/// As diffusers' save_lora_weights writes it: unet.….lora_A.weight, and the metadata that keeps alpha. `folder` gets
/// pytorch_lora_weights.safetensors, whose path is returned.
std::string write_peft_lora(const std::string& folder, const LoraFile& lora);
/// As kohya's trainers and ComfyUI name it, with diffusers' block names. `two_text_encoders`: the model has two, so the
/// first is called lora_te1, else lora_te.
void write_kohya_lora(const std::string& path, const LoraFile& lora, bool two_text_encoders);

}  // namespace md
