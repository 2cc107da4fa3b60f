// The models that the bench times, as training tasks; tests count what their programs consist of.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
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
  const std::string clip = R"({"max_position_embeddings": 77, "architectures": ["CLIPTextModel"]})";
  return make_family(ModelFolder::from_texts({
      {"model_index.json", R"({"_class_name": "StableDiffusionXLPipeline", "scheduler": ["", "DDPMScheduler"],
        "unet": ["", "UNet2DConditionModel"], "vae": ["", "AutoencoderKL"],
        "text_encoder": ["", "CLIPTextModel"], "text_encoder_2": ["", "CLIPTextModelWithProjection"]})"},
      {"scheduler/scheduler_config.json", "{}"},
      {"unet/config.json", unet.empty() ? text("unet.json") : read_file(unet)},
      {"vae/config.json", text("vae.json")},
      {"text_encoder/config.json", clip},
      {"text_encoder_2/config.json", clip},
  }));
}

/// A transformer of videos; the other models of its folder are not used.
inline std::shared_ptr<const Family> make_video_family(const std::string& transformer) {
  const std::string config = read_file(transformer.empty() ? MD_SOURCE_DIR "/bench/models/wan.json" : transformer);
  return make_family(ModelFolder::from_texts({
      {"model_index.json", R"({"_class_name": "WanPipeline", "scheduler": ["", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["", "WanTransformer3DModel"], "vae": ["", "AutoencoderKLWan"],
        "text_encoder": ["", "UMT5EncoderModel"]})"},
      {"scheduler/scheduler_config.json", "{}"},
      {"transformer/config.json", config},
      {"vae/config.json", "{}"},
      {"text_encoder/config.json",
       nlohmann::json{{"model_type", "umt5"}, {"d_model", parse_json(config).at("text_dim")}}.dump()},
  }));
}

/// "unet", "vae" or "wan"; `batch`: 0 is the bench's own; `pixels`: of the side of the UNet's latents; `config`: a file
/// that takes the place of the bench's own config.json.
inline std::unique_ptr<Task> make_bench_task(const std::string& model, int64_t batch, int64_t pixels,
                                             const std::string& config = "") {
  if (model == "wan") {
    auto task = std::make_unique<DenoiseTask>();
    task->family = make_video_family(config);
    task->process = make_process({{"_class_name", "FlowMatchEulerDiscreteScheduler"}}, ProcessKeys{});
    task->size = task->family->spec().autoencoder->media_size({5, 32, 32, 16});  // 1,280 tokens
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
  check(model == "vae", Code::invalid_config, "bench: '{}' is not one of: unet, vae, wan", model);
  auto task = std::make_unique<AutoencoderTask>();
  task->autoencoder = make_bench_family("")->spec().autoencoder;
  task->batch_size = batch > 0 ? batch : 2;
  task->size = {128, 128};
  return task;
}

}  // namespace md
