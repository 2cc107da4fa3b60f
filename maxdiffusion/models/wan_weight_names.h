// Names of WanTransformer3DModel's and AutoencoderKLWan's parameters in the original program and in files with its
// layout. Sources: Wan-Video/Wan2.1, wan/modules/model.py and vae.py; Wan2.2, vae2_2.py; diffusers 0.42,
// loaders/single_file_utils.py.
#pragma once

#include <string>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"

namespace md {

/// The original name of a parameter or module, for diffusers' name: "blocks.3.attn1.to_q.weight" →
/// "blocks.3.self_attn.q.weight". Unknown names are unchanged.
std::string original_wan_name(const std::string& name);
/// Like original_wan_name, without and with the prefixes of single-file checkpoints.
WeightNameMap original_wan_names(const WanTransformerConfig& config);
/// For the autoencoder of either version: "decoder.up_blocks.1.resnets.0.norm1.gamma" →
/// "decoder.upsamples.4.residual.0.gamma". Block numbers depend on the config.
WeightNameMap original_wan_vae_names(const WanVaeConfig& config);

}  // namespace md
