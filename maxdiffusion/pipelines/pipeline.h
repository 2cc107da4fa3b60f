// A loaded pipeline: the text encoders, denoisers, autoencoder and scheduler of a model folder on devices, sampling for
// one request after the other.
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

/// What a pipeline is loaded as. Members are the keys of the same names, with their meanings and defaults.
struct PipelineOptions {
  ModelKeys model;         // revision, variant, files that replace weights, …; the folder's name is load()'s argument
  std::string controlnet;  // a ControlNet's folder or file; empty: none
  LoraKeys lora;           // LoRA files that are added to the weights
  HardwareKeys hardware;   // hardware, plugin, cpu_device_count
  MeshConfig mesh;         // how the devices are arranged
  ShardingKeys sharding;   // how weights and samples are split over them
  LayerKeys layers;        // of the denoisers: dtypes, attention, quantization
  EncoderKeys encoders;    // of the text encoders and the autoencoder: dtypes
  MediaChunkKeys media_chunks;
  CompileConfig compile;
  SampleBatch batch;  // samples at a time
  /// true: all weights and programs stay on the devices for the next request. false: for one request in little memory:
  /// text encoders leave before the denoiser comes, which leaves before the autoencoder comes.
  bool keep_loaded = true;
};

/// Models that are open already, as those of a run that is training.
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
  HostArray media;    // f32 [N, (F,) H, W, 3] in [−1, 1], the samples of a prompt together; or absent
  HostArray latents;  // f32 [N, (F,) h, w, C], scaled as the denoiser has them
  /// Of a request that does not decode: as diffusers' pipelines return them, where these are others; or absent.
  HostArray published_latents;
  std::vector<std::string> parameters;  // of each: prompt, steps, seed, … as AUTOMATIC1111's web UI writes them in PNG
};

/// Thrown where SampleRequest::stop has ended a request.
class Cancelled : public Error {
 public:
  Cancelled() : Error(Code::internal, "the request was cancelled") {}
};

/// Not thread safe: one request at a time for each pipeline; what serves many has a queue before it. Other pipelines
/// may work at the same time. SampleRequest::stop may be used from any thread.
class DiffusionPipeline {
 public:
  /// `folder`: a model folder in diffusers' layout, a single file, the name of a model in the Hugging Face cache, or a
  /// run's folder; may be in a bucket. Weights are read when they are first needed. Throws io for files that are
  /// missing or do not match; invalid_config for options that the model or the devices cannot follow.
  static DiffusionPipeline load(const std::string& folder, const PipelineOptions& options = {});
  /// Samples with models that others hold. Of their denoisers nothing stays on the devices.
  explicit DiffusionPipeline(PipelineModels models);
  DiffusionPipeline(DiffusionPipeline&&) noexcept;
  ~DiffusionPipeline();

  /// With keep_loaded, a request like an earlier one in the sizes, guidance, and numbers of prompts, samples and steps
  /// (with step_by_step: any number) compiles and reads nothing. The same request gives the same bits, whatever was
  /// asked before. Throws before anything is computed: invalid_config, naming the key, for what the model cannot do.
  /// Later: Cancelled and what `progress` throws; device where samples are not finite; out_of_memory. After any error
  /// the pipeline takes the next request.
  SampleResult generate(const SampleRequest& request);

  const Devices& devices() const;
  const std::shared_ptr<const Family>& family() const;
  /// Of a pipeline that was loaded.
  const ModelFolder& folder() const;

 private:
  struct Impl;
  explicit DiffusionPipeline(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
