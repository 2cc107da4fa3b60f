// Names of ZImageTransformer2DModel's parameters in the original program and in ComfyUI's files. Source: diffusers
// 0.42, loaders/single_file_utils.py.
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/z_image_transformer.h"

namespace md {

/// "layers.3.attention.to_k.weight" → the second third of "layers.3.attention.qkv.weight": without and with the prefix
/// of ComfyUI's files.
WeightNameMap original_z_image_names(const ZImageTransformerConfig& config);

}  // namespace md
