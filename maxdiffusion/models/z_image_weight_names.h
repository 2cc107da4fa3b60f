// What the original program of Z-Image, and ComfyUI's files, call the parameters of ZImageTransformer2DModel. Source:
// diffusers 0.42, loaders/single_file_utils.py.
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/z_image_transformer.h"

namespace md {

/// "layers.3.attention.to_k.weight" → the second third of "layers.3.attention.qkv.weight": alone, and with the prefix
/// that ComfyUI's files put before it.
WeightNameMap original_z_image_names(const ZImageTransformerConfig& config);

}  // namespace md
