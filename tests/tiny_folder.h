// A minimal model folder like SDXL's, without weights, for tests of the code around a model.
#pragma once

#include <nlohmann/json.hpp>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/tasks/denoise.h"

namespace md {

/// Text encoders with 5 tokens and widths 4 and 8; latents with 4 channels, 8 pixels per cell. `channels`: of the
/// UNet's two levels.
inline std::shared_ptr<const Family> tiny_family(const std::string& channels = "[8, 16]") {
  const char* clip = R"({"vocab_size": 16, "hidden_size": %d, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 5, "projection_dim": 10, "eos_token_id": 15)";
  auto text = [&](int width, const char* kind) {
    std::string config = clip;
    config.replace(config.find("%d"), 2, std::to_string(width));
    return config + ", \"architectures\": [\"" + kind + "\"]}";
  };
  return make_family(ModelFolder::from_texts({
      {"model_index.json", R"({"_class_name": "StableDiffusionXLPipeline",
        "scheduler": ["diffusers", "EulerDiscreteScheduler"], "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]})"},
      {"scheduler/scheduler_config.json", R"({"_class_name": "EulerDiscreteScheduler"})"},
      {"unet/config.json", R"({"block_out_channels": )" + channels + R"(,
        "in_channels": 4, "out_channels": 4, "sample_size": 8, "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "norm_num_groups": 4, "cross_attention_dim": 12,
        "attention_head_dim": [1, 2], "use_linear_projection": true, "transformer_layers_per_block": [1, 1],
        "addition_embed_type": "text_time", "addition_time_embed_dim": 4,
        "projection_class_embeddings_input_dim": 34})"},
      {"vae/config.json", R"({
        "block_out_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4,
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D", "DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"]})"},
      {"text_encoder/config.json", text(4, "CLIPTextModel")},
      {"text_encoder_2/config.json", text(8, "CLIPTextModelWithProjection")},
  }));
}

/// The task of predicting noise for 64×64 pixels with that model, four samples per batch.
inline DenoiseTask tiny_task() {
  DenoiseTask t;
  t.family = tiny_family();
  t.process =
      make_process({{"beta_schedule", "scaled_linear"}, {"beta_start", 0.00085}, {"beta_end", 0.012}}, ProcessKeys{});
  t.batch_size = 4;
  t.size = {64, 64};
  return t;
}

}  // namespace md
