// What the original program of Flux, and the many files that follow it, call the parameters of FluxTransformer2DModel.
// Sources: black-forest-labs/flux, src/flux/model.py; XLabs-AI/x-flux, src/flux/modules/layers.py (LoRA processors);
// diffusers 0.42, loaders/single_file_utils.py and loaders/lora_conversion_utils.py. Its autoencoder has the names of
// Stable Diffusion's (original_weight_names.h).
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/flux_transformer.h"

namespace md {

/// "transformer_blocks.3.attn.to_k.weight" → the second third of "double_blocks.3.img_attn.qkv.weight": alone, and with
/// the prefixes that files of whole pipelines put before it; last, what LoRA files of XLabs call it.
WeightNameMap original_flux_names(const FluxTransformerConfig& config);

}  // namespace md
