// What the original program of Wan, and the many files that follow it, call the parameters of WanTransformer3DModel.
// Sources: Wan-Video/Wan2.1, wan/modules/model.py; diffusers 0.42, loaders/single_file_utils.py.
#pragma once

#include <string>

#include "maxdiffusion/base/other_name.h"
#include "maxdiffusion/models/wan_transformer.h"

namespace md {

/// The original name of a parameter, or of a module, by that of diffusers: "blocks.3.attn1.to_q.weight" →
/// "blocks.3.self_attn.q.weight". Names that are the same in both, and unknown ones, come back as they are.
std::string original_wan_name(const std::string& name);
/// The same as files write it: alone, and with the prefixes that files of whole pipelines put before it.
OtherNames original_wan_names(const WanTransformerConfig& config);

}  // namespace md
