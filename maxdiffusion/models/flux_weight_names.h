// Names of the parameters of FLUX.1 and FLUX.2 in the original programs and in files with their layout, ComfyUI's too.
// Sources: black-forest-labs/flux, src/flux/model.py, and black-forest-labs/flux2; XLabs-AI/x-flux,
// src/flux/modules/layers.py (LoRA processors); diffusers 0.42, loaders/single_file_utils.py and
// loaders/lora_conversion_utils.py. Their autoencoders use the names of Stable Diffusion's (original_weight_names.h).
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux2_vae.h"
#include "maxdiffusion/models/flux_transformer.h"

namespace md {

/// "transformer_blocks.3.attn.to_k.weight" → the second third of "double_blocks.3.img_attn.qkv.weight": without and
/// with the prefixes of single-file checkpoints; last, the name in XLabs' LoRA files.
WeightNameMap original_flux_names(const FluxTransformerConfig& config);
/// Like the above for FLUX.2, without XLabs' names.
WeightNameMap original_flux2_names(const Flux2TransformerConfig& config);
WeightNameMap original_flux2_vae_names(const Flux2VaeConfig& config);

}  // namespace md
