// What the keys ask of a command, as values: made once, before anything is opened. Nothing above settings/ reads a
// RunConfig.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/settings/key_rules.h"
#include "maxdiffusion/settings/run_info.h"

namespace md {

struct ModelRequest {
  ModelKeys keys;
  Purpose purpose = Purpose::training;
  uint64_t seed = 0;  // of random weights
  SchedulerKeys scheduler;
  int64_t norm_num_groups = 32;  // see Family::check_repeated_keys
};
struct DeviceRequest {
  HardwareKeys hardware;
  MeshConfig mesh;
  ShardingKeys sharding;
};
/// How the models around the trained one run, and what that leaves of the devices' memory.
struct EncoderOptions {
  EncoderKeys keys;
  LayerKeys layers;
  MediaChunkKeys chunks;
  CompileConfig compile;
  SampleKeys sizes;  // height, width and num_frames are read
  int64_t resolution = 512;
  bool trains_lora = false, averages = false;
};
/// The devices that train, and in how many replicas they are (Devices::replicas).
struct DeviceCounts {
  int64_t devices = 1, replicas = 1;
};
struct ComponentsRequest {
  ModelRequest model;
  DeviceRequest devices;
  EncoderOptions encoders;
};
/// Files that complete a request: paths, or addresses of the web; empty: none.
struct SampleFiles {
  std::string latents, last_image, control_image, control_preprocessor;
  std::vector<std::string> images = {};
};
/// The keys of sampling as a request, with the run's sample_seed. A second prompt of the file is left out where the
/// command line gives the first.
struct SamplingRequest {
  SampleRequest request;  // without what is in the files
  SampleFiles files;
  SampleBatch batch;
  std::string output_type;  // of write_media
  double fps = 16;
};
SamplingRequest sampling_request(const RunConfig& config, const RunInfo& run);

/// What is sampled from the prompts of a run while it trains.
struct SamplePlan {
  int64_t every = 0;                                // steps between sample grids; -1: after the last step; 0: none
  bool after_evaluation = false, compares = false;  // enable_generate_video_for_eval, enable_ssim
  SamplingRequest sampling;
};
/// Everything that the keys say of a run that trains, before anything is opened: what `train`, and whatever looks at
/// its stages, are given.
struct TrainingRequest {
  RunInfo run;
  ComponentsRequest components;
  DataKeys data;
  LearningKeys learning;
  SamplingRequest sampling;
  std::optional<SamplePlan> samples;  // none: nothing is sampled, whichever process
  PipelineOptions pipeline;           // of DreamBooth's class images
  KeyRules rules;
};
/// `joins`: the processes that were started with this one are joined first.
TrainingRequest training_request(const RunConfig& config, bool joins = false);

/// Where the run may be whose checkpoint `generate` samples with, and the model that is taken otherwise.
struct RunSearch {
  ModelKeys model;
  std::string file, run_name, output_dir, output_dir_of_file, checkpoint_dir;  // as in RunConfig
  std::vector<std::string> untrained;     // keys of weights that only training makes
  std::set<std::string> on_command_line;  // keys
};
struct GenerateRequest {
  RunSearch search;
  PipelineOptions pipeline;  // of the model that the keys name; `controlnet` as they name it
  SamplingRequest sampling;
  bool profile = false;
  KeyRules rules;
};
GenerateRequest generate_request(const RunConfig& config);

/// The axis rules of the keys, or `of_family` where there are none. Throws invalid_config.
AxisRules axis_rules(const DeviceRequest& request, const std::string& of_family);
/// The devices, under these rules. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const DeviceRequest& request, const std::string& of_family = "");
DeviceRequest device_request(const RunConfig& config);

}  // namespace md
