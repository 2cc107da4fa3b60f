// What the keys ask of a run's devices and models, as values for run/model_components.h.
#pragma once

#include <string>

#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/settings/run_info.h"

namespace md {

struct ModelRequest {
  ModelKeys keys;
  std::string folder, controlnet;  // see open_model
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
  std::string latents, first_image, last_image, control_image, control_preprocessor;
};
/// What the keys ask of sampling, with the run's sample_seed. A second prompt of the file is left out where the command
/// line gives the first.
struct SamplingRequest {
  SampleRequest request;  // without what is in the files
  SampleFiles files;
  SampleBatch batch;
  std::string output_type;  // of write_media
  double fps = 16;
};
SamplingRequest sampling_request(const RunConfig& config, const RunInfo& run);
/// The axis rules of the keys, or `of_family` where there are none. Throws invalid_config.
AxisRules axis_rules(const DeviceRequest& request, const std::string& of_family);
/// The devices, under these rules. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const DeviceRequest& request, const std::string& of_family = "");
DeviceRequest device_request(const RunConfig& config);
/// Of the model that the keys name.
ComponentsRequest components_request(const RunConfig& config, const RunInfo& run, Purpose purpose = Purpose::training);

}  // namespace md
