// What the original program of Wan, and the many files that follow it, call the parameters of WanTransformer3DModel and
// AutoencoderKLWan. Sources: Wan-Video/Wan2.1, wan/modules/model.py and vae.py; Wan2.2, vae2_2.py; diffusers 0.42,
// loaders/single_file_utils.py.
#pragma once

#include <string>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"

namespace md {

/// The original name of a parameter, or of a module, by that of diffusers: "blocks.3.attn1.to_q.weight" →
/// "blocks.3.self_attn.q.weight". Names that are the same in both, and unknown ones, come back as they are.
std::string original_wan_name(const std::string& name);
/// The same as files write it: alone, and with the prefixes that files of whole pipelines put before it.
WeightNameMap original_wan_names(const WanTransformerConfig& config);
/// Of the autoencoder, of either version: "decoder.up_blocks.1.resnets.0.norm1.gamma" →
/// "decoder.upsamples.4.residual.0.gamma". Blocks are counted otherwise, so that names follow from the config.
WeightNameMap original_wan_vae_names(const WanVaeConfig& config);

}  // namespace md
