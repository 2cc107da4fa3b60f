#include "maxdiffusion/models/registry.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/models/flux2_vae.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/flux_weight_names.h"
#include "maxdiffusion/models/ip_adapter.h"
#include "maxdiffusion/models/original_weight_names.h"
#include "maxdiffusion/models/qwen_image_transformer.h"
#include "maxdiffusion/models/rrdb_net.h"
#include "maxdiffusion/models/t2i_adapter.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/tiny_vae.h"
#include "maxdiffusion/models/tiny_video_vae.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"
#include "maxdiffusion/models/wan_weight_names.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "maxdiffusion/models/z_image_weight_names.h"

namespace md {
namespace {

std::vector<ModelClass>& classes() {
  static std::vector<ModelClass> all = {
      model_class("UNet2DConditionModel", trace_unet2d, original_unet_names),
      model_class("AutoencoderKL", trace_vae, original_vae_names, kl_autoencoder),
      model_class<void, TinyVaeConfig>("AutoencoderTiny", trace_tiny_vae, nullptr, tiny_autoencoder),
      model_class<void, TinyVideoVaeConfig>("TAEHV", trace_tiny_video_vae, nullptr, tiny_video_autoencoder),
      model_class("RRDBNet", trace_rrdb_net, original_rrdb_names, rrdb_upscaler),
      model_class("CLIPTextModel", trace_clip_text, original_clip_text_names),
      model_class("CLIPTextModelWithProjection", trace_clip_text, original_clip_text_names),
      model_class("ControlNetModel", trace_controlnet, original_controlnet_names),
      model_class("IPAdapter", trace_ip_adapter),
      model_class("T2IAdapter", trace_t2i_adapter),
      model_class("T5EncoderModel", trace_t5_encoder, llama_t5_names),
      model_class("UMT5EncoderModel", trace_t5_encoder, llama_t5_names),
      model_class<Qwen3Config>("Qwen3Model", trace_decoder, causal_decoder_names),
      model_class<Qwen3Config>("Qwen3ForCausalLM", trace_decoder, causal_decoder_names),
      model_class<Qwen25VlConfig>("Qwen2_5_VLForConditionalGeneration", trace_decoder, causal_decoder_names),
      model_class("CLIPVisionModel", trace_clip_vision),
      model_class("CLIPVisionModelWithProjection", trace_clip_vision),
      model_class("AutoencoderKLWan", trace_wan_vae, original_wan_vae_names, wan_autoencoder),
      model_class<QwenImageVaeConfig>("AutoencoderKLQwenImage", trace_wan_vae, original_wan_vae_names, wan_autoencoder),
      model_class("AutoencoderKLFlux2", trace_flux2_vae, original_flux2_vae_names, flux2_autoencoder),
      model_class("Flux2Transformer2DModel", trace_flux2_transformer, original_flux2_names),
      model_class("FluxTransformer2DModel", trace_flux_transformer, original_flux_names),
      model_class("WanTransformer3DModel", trace_wan_transformer, original_wan_names),
      model_class("QwenImageTransformer2DModel", trace_qwen_image_transformer, original_qwen_image_names),
      model_class("ZImageTransformer2DModel", trace_z_image_transformer, original_z_image_names),
  };
  return all;
}

}  // namespace

void add_model_class(ModelClass c) {
  for (ModelClass& known : classes())
    if (known.name == c.name) {
      known = std::move(c);
      return;
    }
  classes().push_back(std::move(c));
}

const ModelClass* find_model_class(const std::string& name) {
  for (const ModelClass& c : classes())
    if (name == c.name || name == "Flax" + c.name) return &c;
  return nullptr;
}

std::vector<std::string> model_class_names() {
  std::vector<std::string> names;
  for (const ModelClass& c : classes()) names.push_back(c.name);
  return names;
}

}  // namespace md
