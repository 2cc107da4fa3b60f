// Names of parameters in the original latent-diffusion programs and in files with their layout, for the names of
// diffusers and transformers. Unknown names have no alias. Sources: CompVis/latent-diffusion and
// CompVis/stable-diffusion (openaimodel.py, model.py); Stability-AI/generative-models; lllyasviel/ControlNet (cldm.py);
// mlfoundations/open_clip (transformer.py); diffusers 0.42, loaders/single_file_utils.py and
// scripts/convert_diffusers_to_original_*.py.
#pragma once

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"

namespace md {

WeightNameMap original_unet_names(const UNetConfig& config);
WeightNameMap original_controlnet_names(const ControlNetConfig& config);
WeightNameMap original_vae_names(const VaeConfig& config);
/// For both kinds of text encoders: OpenAI's, with transformers' names, and OpenCLIP's, with fused queries, keys and
/// values.
WeightNameMap original_clip_text_names(const ClipTextConfig& config);

}  // namespace md
