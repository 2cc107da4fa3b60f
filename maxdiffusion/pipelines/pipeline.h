// A loaded pipeline: the text encoders, denoisers, autoencoder and scheduler of a model folder on devices. It samples
// one request at a time.
//
//   md::DiffusionPipeline pipeline = md::DiffusionPipeline::load("FOLDER");
//   md::SampleRequest request;
//   request.prompt = {"a red cat"};
//   const md::SampleResult result = pipeline.generate(request);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/lora/lora_keys.h"
#include "maxdiffusion/pipelines/sample_request.h"
#include "maxdiffusion/runtime/hardware_keys.h"

namespace md {

/// Options of load(). Members are the keys of the same names, with their meanings and defaults.
struct PipelineOptions {
  ModelKeys model;  // revision, variant, files that replace weights, …; the folder's name is load()'s argument
  std::vector<std::string> controlnets;  // folders or files of ControlNets; empty: the folder's own, if it has any
  AddedModelKeys added;                  // a tiny autoencoder for previews, an upscaler
  AdapterFiles adapters;                 // of images: IP-Adapter, T2I-Adapter
  LoraKeys lora;                         // LoRA files that are merged into the weights
  std::vector<LoraKeys> later_loras;     // of set_loras: their learned embeddings are read at the start
  HardwareKeys hardware;                 // hardware, plugin, cpu_device_count
  MeshConfig mesh;                       // arrangement of the devices
  ShardingKeys sharding;                 // sharding of weights and samples
  LayerKeys layers;                      // of the denoisers: dtypes, attention, quantization
  EncoderKeys encoders;                  // of the text encoders and the autoencoder: dtypes
  MediaChunkKeys media_chunks;
  CompileConfig compile;
  SampleBatch batch;  // samples at a time
  /// true: all weights and programs stay on the devices for the next request. false: saves memory in a single request:
  /// the text encoders are released before the denoiser is loaded, and the denoiser before the autoencoder.
  bool keep_loaded = true;
};

/// Models that are already open, for example those of a training run.
struct PipelineModels {
  const Devices& devices;
  std::shared_ptr<const Family> family;
  std::string name, scheduler_config;  // the folder's name; the text of scheduler_config.json
  WeightsOf weights;                   // of the denoisers, and of an image encoder
  std::function<TextEncoder&()> text_encoder;
  std::function<MediaAutoencoder&()> autoencoder;
  ScopeOptions scope;  // of the denoisers
  CompileConfig compile;
  SampleBatch batch;
};

struct SampleResult {
  HostArray media;    // f32 [N, (F,) H, W, 3] in [−1, 1], the samples of a prompt adjacent; or absent
  HostArray latents;  // f32 [N, (F,) h, w, C], scaled for the denoiser
  /// Only without decoding, and if they differ from `latents`: the latents that diffusers' pipelines return.
  HostArray published_latents;
  std::vector<std::string> parameters;  // of each sample: prompt, seed, … in the format of AUTOMATIC1111's web UI
};

/// Thrown when SampleRequest::stop ends a request.
class Cancelled : public Error {
 public:
  Cancelled() : Error(Code::internal, "the request was cancelled") {}
};

/// Not thread safe: one request at a time for each pipeline; a server queues requests. Different pipelines may run at
/// the same time. SampleRequest::stop may be used from any thread.
class DiffusionPipeline {
 public:
  /// `folder`: a model folder in diffusers' layout, a single file, the name of a model in the Hugging Face cache, or a
  /// run's folder; may be in a bucket. Weights are read when first needed. Throws io for files that are missing or do
  /// not match; invalid_config for options that the model or the devices do not support.
  static DiffusionPipeline load(const std::string& folder, const PipelineOptions& options = {});
  /// Loads a folder on the devices of another, loaded pipeline; options.hardware is ignored.
  static DiffusionPipeline load_on_same_devices(const DiffusionPipeline& other, const std::string& folder,
                                                const PipelineOptions& options = {});
  /// Samples with models that the caller owns. Their denoisers do not stay on the devices.
  explicit DiffusionPipeline(PipelineModels models);
  DiffusionPipeline(DiffusionPipeline&&) noexcept;
  ~DiffusionPipeline();

  /// Samples one request. With hires_scale above 1 it samples twice and returns the second result. With keep_loaded, a
  /// request with the sizes, guidance (its scale aside) and numbers of prompts and samples of an earlier one (with
  /// scan_diffusion_loop: and of steps) compiles and reads nothing. Equal requests give equal bits, whatever was called
  /// before. Throws invalid_config, naming the key, before anything is computed if the model does not support the
  /// request. Later it throws Cancelled, what `progress` throws, device if samples are not finite, and out_of_memory.
  /// With keep_loaded, if memory is used up, a warning says so and the request begins again without keep_loaded; if it
  /// succeeds, later requests of as many pixels and samples run so at once, and smaller ones with keep_loaded. The
  /// pipeline accepts further requests after any error.
  SampleResult generate(const SampleRequest& request);

  /// Replaces the LoRA files of a loaded pipeline, effective with the next request. Weights are read again; nothing is
  /// recompiled. Learned embeddings in the files must have been read by load(). Throws as load() does for LoRA files
  /// that do not fit, and keeps the old ones.
  void set_loras(const LoraKeys& keys);
  /// Throws what set_loras would, and keeps the old files.
  void check_loras(const LoraKeys& keys) const;

  const Devices& devices() const;
  const std::shared_ptr<const Family>& family() const;
  /// The folder of a pipeline from load().
  const ModelFolder& folder() const;

 private:
  struct Impl;
  explicit DiffusionPipeline(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
