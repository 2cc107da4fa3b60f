// Names of FluxTransformer2DModel's parameters in the original program and in files with its layout. Sources:
// black-forest-labs/flux, src/flux/model.py; XLabs-AI/x-flux, src/flux/modules/layers.py (LoRA processors); diffusers
// 0.42, loaders/single_file_utils.py and loaders/lora_conversion_utils.py. Its autoencoder uses the names of Stable
// Diffusion's (original_weight_names.h).
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/flux_transformer.h"

namespace md {

/// "transformer_blocks.3.attn.to_k.weight" → the second third of "double_blocks.3.img_attn.qkv.weight": without and
/// with the prefixes of single-file checkpoints; last, the name in XLabs' LoRA files.
WeightNameMap original_flux_names(const FluxTransformerConfig& config);

}  // namespace md
