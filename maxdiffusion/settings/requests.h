// The keys of a command as values, built once before any file is opened. Modules above settings/ read these, not
// RunConfig.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/pipelines/pipeline.h"
#include "maxdiffusion/settings/key_rules.h"
#include "maxdiffusion/settings/run_info.h"
#include "maxdiffusion/settings/xy_axes.h"

namespace md {

struct ModelRequest {
  ModelKeys keys;
  Purpose purpose = Purpose::training;
  uint64_t seed = 0;  // of random weights
  SchedulerKeys scheduler;
  InversionKeys inversion = {};  // the word whose embeddings are trained
  int64_t norm_num_groups = 32;  // see check_repeated_keys (families/reference_conventions.h)
};
struct DeviceRequest {
  HardwareKeys hardware;
  MeshConfig mesh;
  ShardingKeys sharding;
};
/// Options of the frozen models of a run, and keys that determine how much device memory they may use.
struct EncoderOptions {
  EncoderKeys keys;
  LayerKeys layers;
  MediaChunkKeys chunks;
  CompileConfig compile;
  SampleKeys sizes;  // only height, width and num_frames are used
  int64_t resolution = 512;
  int64_t state_bytes_per_weight = 0;  // of a denoiser, between steps, without the weight; 0: all are frozen
};
/// Number of devices that train, and of their replicas (Devices::replicas).
struct DeviceCounts {
  int64_t devices = 1, replicas = 1;
};
struct ComponentsRequest {
  ModelRequest model;
  DeviceRequest devices;
  EncoderOptions encoders;
};
/// Files that complete a request: paths, or web addresses; empty: none.
struct SampleFiles {
  std::string latents, last_image, mask_image = {};
  std::map<std::string, std::string> adapter_images = {};                                 // by ImageAdapter::name
  std::vector<std::string> images = {}, control_images = {}, control_preprocessors = {};  // the last two: equally many
};
/// The keys of sampling as a request, with the run's sample_seed. If the command line sets the first prompt, a second
/// prompt of the file is dropped.
struct SamplingRequest {
  SampleRequest request;  // without the contents of `files`
  SampleFiles files;
  SampleBatch batch;
  std::optional<int64_t> only_image = {};  // number of the only sample that is written; none: all are
  std::string output_type;                 // as in write_media
  double fps = 16;
};
SamplingRequest sampling_request(const RunConfig& config, const RunInfo& run);

/// Samples that a run generates from its prompts while it trains.
struct SamplePlan {
  int64_t every = 0;                                // steps between sample grids; -1: after the last step; 0: none
  bool after_evaluation = false, compares = false;  // enable_generate_video_for_eval, enable_ssim
  SamplingRequest sampling;
};
/// All keys of a training run as values, built before any file is opened: the input of `train`, and of commands that
/// inspect its stages.
struct TrainingRequest {
  RunInfo run;
  ComponentsRequest components;
  DataKeys data;
  LearningKeys learning;
  SamplingRequest sampling;
  std::optional<SamplePlan> samples;  // none: nothing is sampled; equal in every process
  PipelineOptions pipeline;           // for DreamBooth's class images
  std::string check_dir;              // for `check`: folder of the images it writes
  KeyRules rules;
};
/// `joins`: first connects to the processes that were started with this one.
TrainingRequest training_request(const RunConfig& config, bool joins = false);

/// Where to search for the run whose checkpoint `generate` loads, and the model to load if there is none.
struct RunSearch {
  ModelKeys model;
  std::string file, run_name, output_dir, output_dir_of_file, checkpoint_dir;  // as in RunConfig
  std::vector<std::string> untrained;     // set keys that make weights random until they are trained
  std::set<std::string> on_command_line;  // keys
};
RunSearch run_search(const RunConfig& config);
/// Samples that are generated together: all prompts of the keys, or those of one line of prompt_file.
struct GenerateItem {
  SamplingRequest sampling;
  LoraKeys lora;      // from the keys and from tags in the prompts
  std::string where;  // "FILE:3"; empty: the keys
  /// The image_keys() that differ from their defaults, as YAML, with absolute paths. The same model and compiler
  /// options generate the same samples from equal settings.
  std::map<std::string, std::string> settings;
};
struct GenerateRequest {
  RunSearch search;
  PipelineOptions pipeline;         // for the model of the keys; `controlnets` as the keys name them
  std::vector<GenerateItem> items;  // at least one
  std::vector<XyAxis> axes = {};    // axes of the sheet of all items, row by row; empty: none
  bool profile = false;
  KeyRules rules;
  std::string lora_dir = {};  // folder of LoRA files for prompts of server requests
};
/// Keys that an image carries and may set: prompts, sampling, weights and mesh. Images are untrusted input, so none of
/// these keys loads code, writes files, holds a secret, or belongs to training only. PromptKeys are excluded, because
/// they read whole folders: an image carries the expanded prompt; and previews, which are of one run.
const std::set<std::string>& image_keys();
/// Reads prompt_file and wildcards, and expands prompts. Throws invalid_config and io as prompt_lines, DynamicPrompts
/// and take_lora_tags.
GenerateRequest generate_request(const RunConfig& config);

/// What a server loads, and the defaults of its requests: one item without prompts. Warns about keys that only requests
/// may set.
GenerateRequest serve_request(const RunConfig& config);

/// The axis rules of the keys; if empty, `of_family`. Throws invalid_config.
AxisRules axis_rules(const DeviceRequest& request, const std::string& of_family);
/// Opens the devices with these rules. Throws as pjrt::Client::open and Mesh::make.
Devices open_devices(const DeviceRequest& request, const std::string& of_family = "");
DeviceRequest device_request(const RunConfig& config);

}  // namespace md
