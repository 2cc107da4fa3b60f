// The models that the bench times, as training tasks; tests count the instructions of their programs.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/denoise.h"

namespace md {

/// The models of the bench as one folder of SDXL's kind.
inline std::shared_ptr<const Family> make_bench_family(const std::string& unet) {
  auto text = [](const char* file) { return read_file(std::string(MD_SOURCE_DIR "/bench/models/") + file); };
  nlohmann::json clip = {{"max_position_embeddings", 77}, {"architectures", nlohmann::json::array({"CLIPTextModel"})}};
  const std::string unet_config = unet.empty() ? text("unet.json") : read_file(unet), first = clip.dump();
  const nlohmann::json parsed = parse_json(unet_config);
  if (const nlohmann::json inputs = parsed.value("projection_class_embeddings_input_dim", nlohmann::json());
      inputs.is_number())
    clip["projection_dim"] = inputs.get<int64_t>() - 6 * parsed.at("addition_time_embed_dim").get<int64_t>();
  return make_family(ModelFolder::from_texts({
      {"model_index.json", R"({"_class_name": "StableDiffusionXLPipeline", "scheduler": ["", "DDPMScheduler"],
        "unet": ["", "UNet2DConditionModel"], "vae": ["", "AutoencoderKL"],
        "text_encoder": ["", "CLIPTextModel"], "text_encoder_2": ["", "CLIPTextModelWithProjection"]})"},
      {"scheduler/scheduler_config.json", "{}"},
      {"unet/config.json", unet_config},
      {"vae/config.json", text("vae.json")},
      {"text_encoder/config.json", first},
      {"text_encoder_2/config.json", clip.dump()},
  }));
}

/// FLUX.1's latents: 16 channels of an eighth of the image's height and width.
inline const nlohmann::json kFluxAutoencoder = {{"latent_channels", 16},
                                                {"block_out_channels", {32, 32, 32, 32}},
                                                {"down_block_types", std::vector<std::string>(4, "DownEncoderBlock2D")},
                                                {"up_block_types", std::vector<std::string>(4, "UpDecoderBlock2D")}};

/// A transformer trained with flow matching and timed alone: the other models of its folder are not used.
struct BenchTransformer {
  const char *name, *index;          // model_index.json
  nlohmann::json vae, text_encoder;  // config.json of each; the text encoder's lacks its width
  const char *width_in, *width;      // config key of the text width: the transformer's, the encoder's
  Dims latents;
};

inline std::optional<BenchTransformer> bench_transformer(const std::string& name) {
  if (name == "wan")
    return BenchTransformer{"wan",
                            R"({"_class_name": "WanPipeline", "scheduler": ["", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["", "WanTransformer3DModel"], "vae": ["", "AutoencoderKLWan"],
        "text_encoder": ["", "UMT5EncoderModel"]})",
                            nlohmann::json::object(),
                            {{"model_type", "umt5"}},
                            "text_dim",
                            "d_model",
                            {5, 32, 32, 16}};  // 1,280 tokens
  if (name == "z_image")
    return BenchTransformer{"z_image",
                            R"({"_class_name": "ZImagePipeline", "scheduler": ["", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["", "ZImageTransformer2DModel"], "vae": ["", "AutoencoderKL"],
        "text_encoder": ["", "Qwen3Model"]})",
                            kFluxAutoencoder,
                            nlohmann::json::object(),
                            "cap_feat_dim",
                            "hidden_size",
                            {64, 64, 16}};  // 1,024 tokens, and 512 of text
  if (name == "qwen_image")
    return BenchTransformer{
        "qwen_image",
        R"({"_class_name": "QwenImagePipeline", "scheduler": ["", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["", "QwenImageTransformer2DModel"], "vae": ["", "AutoencoderKLQwenImage"],
        "text_encoder": ["", "Qwen2_5_VLForConditionalGeneration"]})",
        nlohmann::json::object(),
        {{"num_attention_heads", 4}, {"num_key_value_heads", 4}},
        "joint_attention_dim",
        "hidden_size",
        {64, 64, 16}};  // 1,024 tokens, and 512 of text
  return {};
}

inline std::shared_ptr<const Family> make_transformer_family(const BenchTransformer& b, const std::string& file) {
  const std::string config =
      read_file(file.empty() ? fmt::format("{}/bench/models/{}.json", MD_SOURCE_DIR, b.name) : file);
  nlohmann::json text_encoder = b.text_encoder;
  text_encoder[b.width] = parse_json(config).at(b.width_in);
  return make_family(ModelFolder::from_texts({
      {"model_index.json", b.index},
      {"scheduler/scheduler_config.json", "{}"},
      {"transformer/config.json", config},
      {"vae/config.json", b.vae.dump()},
      {"text_encoder/config.json", text_encoder.dump()},
  }));
}

/// `model`: "unet", "vae", "wan", "z_image" or "qwen_image". `batch`: 0 means the bench's default. `pixels`: height and
/// width of the UNet's latents. `config`: a file used instead of the bench's config.json.
inline std::unique_ptr<Task> make_bench_task(const std::string& model, int64_t batch, int64_t pixels,
                                             const std::string& config = "") {
  if (const auto transformer = bench_transformer(model)) {
    auto task = std::make_unique<DenoiseTask>();
    task->family = make_transformer_family(*transformer, config);
    task->process = make_process({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, ProcessKeys{});
    task->size = task->family->spec().autoencoder->media_size(transformer->latents);
    if (batch > 0) task->batch_size = batch;
    return task;
  }
  if (model == "unet") {
    auto task = std::make_unique<DenoiseTask>();
    task->family = make_bench_family(config);
    task->process =
        make_process({{"beta_schedule", "scaled_linear"}, {"beta_start", 0.00085}, {"beta_end", 0.012}}, ProcessKeys{});
    task->batch_size = batch > 0 ? batch : 2;
    task->size = task->family->spec().autoencoder->media_size({pixels, pixels, 4});
    task->conditioning_size = MediaSize{8 * pixels, 8 * pixels};
    return task;
  }
  check(model == "vae", Code::invalid_config, "bench: '{}' is not one of: unet, vae, wan, z_image, qwen_image", model);
  auto task = std::make_unique<AutoencoderTask>();
  task->autoencoder = make_bench_family("")->spec().autoencoder;
  task->batch_size = batch > 0 ? batch : 2;
  task->size = {128, 128};
  return task;
}

}  // namespace md
