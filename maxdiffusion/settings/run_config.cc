#include "maxdiffusion/settings/run_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/schedulers/sampler_names.h"
#include "maxdiffusion/settings/foreign_keys.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/storage/hub.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

void check_libtpu_flags(const RunConfig& c) {
  const std::string& flags = c.compile.libtpu_flags;
  if (flags.empty()) return;
  std::vector<std::string> known;
  for (const pjrt::FlagSet& set : pjrt::kTpuPlatform.flag_sets) known.emplace_back(set.name);
  check(std::ranges::find(known, flags) != known.end(), Code::invalid_config, "libtpu_flags '{}' is not one of {}",
        flags, fmt::join(known, ", "));
  if (c.hardware.hardware != "tpu" && c.hardware.topology.empty())
    log_warning("libtpu_flags is ignored: hardware is {}", c.hardware.hardware);
}

/// Throws unless a run's name is a single folder name in output_dir.
void check_run_name(const std::string& name) {
  const bool control = std::ranges::any_of(name, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
  check(name != "." && name != ".." && name.find('/') == std::string::npos && !control, Code::invalid_config,
        "run_name is '{}'; expected the name of one folder in output_dir, without /", name);
}

/// Of the keys that set the location of the data, keeps the one with the highest priority: the command line, the file,
/// its parents; clears the others in `data`. `source`: the keys with their priorities. Throws invalid_config if the
/// command line sets two of them; warns if a file does, as MaxDiffusion's files with a dataset_name do.
void choose_data(const ConfigSource& source, DataSourceConfig& data) {
  // In order of precedence.
  const std::pair<const char*, std::string*> places[] = {{"dataset_config", &data.dataset_config},
                                                         {"hf_train_files", &data.hf_train_files},
                                                         {"grain_train_files", &data.grain_train_files},
                                                         {"train_data_dir", &data.train_data_dir},
                                                         {"hf_data_dir", &data.hf_data_dir},
                                                         {"dataset_name", &data.dataset_name}};
  const auto value_of = [&](const auto& place) {
    const auto it = source.values().find(place.first);
    return place.second->empty() || it == source.values().end() ? nullptr : &it->second;
  };
  const ConfigValue* nearest = nullptr;
  const char* chosen = nullptr;
  for (const auto& place : places)
    if (const ConfigValue* v = value_of(place); v && (!nearest || v->layer > nearest->layer))
      nearest = v, chosen = place.first;
  for (const auto& place : places) {
    const ConfigValue* v = value_of(place);
    if (!v || place.first == chosen) continue;
    // MaxDiffusion names a builder, such as parquet, in addition to its files.
    const bool builder = place.first == std::string("dataset_name") && std::string(chosen).starts_with("hf_");
    if (v->layer == nearest->layer && !builder) {
      check(v->where != kCommandLine, Code::invalid_config, "{} and {} are both given; expected one location of data",
            chosen, place.first);
      log_warning("{}: {} is ignored: {} is the location of the data", v->where, place.first, chosen);
    }
    place.second->clear();
  }
}

void check_sampler(const std::string& name) {
  if (name.empty() || !sampler_name(name).empty()) return;
  const std::vector<std::string> known = sampler_names();
  const bool missing = is_unsupported_sampler(name);
  Error e(Code::invalid_config,
          fmt::format("scheduler is '{}'{}; expected one of: {}", name, missing ? ", which is not supported" : "",
                      missing ? fmt::format("{}", fmt::join(known, ", ")) : nearest_first(name, known)));
  if (std::ranges::count(schedule_names(), name) > 0)
    e.note(fmt::format("try: lr_scheduler={}, the schedule of the learning rate", name));
  else if (const std::string near = missing ? "" : nearest(name, known); !near.empty())
    e.note(fmt::format("try: scheduler={}", near));
  throw e;
}

}  // namespace

RunConfig RunConfig::load(const std::string& file, const std::vector<std::string>& overrides) {
  RunConfig keys_only;
  KeyList keys;
  keys.add(keys_only);
  RunConfig c = from_source(file.empty() ? ConfigSource::from_text("", keys.overrides(overrides))
                                         : ConfigSource::load(file, keys.overrides(overrides)));
  c.file = file;
  return c;
}

RunConfig RunConfig::from_source(ConfigSource source) {
  source.rename(renamed_keys());
  check_family_of_file(source);
  RunConfig c;
  KeyList keys;
  keys.add(c);
  keys.assign(without_keys_of_family(source), foreign_keys());
  choose_data(source, c.source);
  for (const auto& [key, value] : source.values())
    if (value.where == kCommandLine) c.on_command_line.insert(key);
  if (const ConfigValue* replaced = source.overridden("output_dir")) c.output_dir_of_file = replaced->text;
  c.reference.validate();
  set_hub_token(c.hub.hf_access_token);
  c.step_cache.validate();
  make_optimizer(c.optim);  // throws for contradicting keys
  c.layers.quantization.warn();
  if (const char* job = std::getenv("JOBSET_NAME"); job && c.run.run_name.empty()) c.run.run_name = job;
  if (c.run.output_dir.empty()) c.run.output_dir = c.run.base_output_directory;
  check_run_name(c.run.run_name);
  for (const ConfigKey& key : keys.keys()) {
    if (key.path == KeyPath::none) continue;
    const bool written = key.path == KeyPath::output || key.path == KeyPath::output_or_word;
    for (const std::string* place : key.paths()) {
      check(!written || is_remote(*place) || place->find("://") == std::string::npos, Code::invalid_config,
            "{} is '{}'; expected a local folder, gs:// or s3://", key.name, shown(*place));
      check(!has_secret(*place), Code::invalid_config,
            "{} holds a secret key, which would be saved with the run; expected it in AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY",
            key.name);
    }
  }
  // Names are checked before anything starts, each by the list that defines it.
  text_encoder_options(autoencoder_options(scope_options(c.layers), c.encoders), c.encoders);
  if (c.layers.attention == "cudnn_flash_te" && c.hardware.hardware != "gpu")
    log_warning("attention=cudnn_flash_te: hardware is {}, cuDNN needs gpu; flash is used", c.hardware.hardware);
  pjrt::platform_for(c.hardware.hardware);
  check_libtpu_flags(c);
  check_sampler(c.scheduler.scheduler);
  check(!c.mesh.has_fsdp_batch() || c.batches.per_device_batch_size == std::floor(c.batches.per_device_batch_size),
        Code::invalid_config,
        "per_device_batch_size is {}; expected a whole number with ici_fsdp_batch_parallelism or "
        "dcn_fsdp_batch_parallelism; fractions go with ici_fsdp_parallelism and ici_context_parallelism",
        c.batches.per_device_batch_size);
  return c;
}

std::string RunConfig::to_yaml() const {
  KeyList keys;
  RunConfig copy = *this;
  copy.hub.hf_access_token.clear();  // other people may read what is printed and saved
  keys.add(copy);
  keys.make_paths_absolute();  // so that the run's config.yml can be read from any folder
  return keys.to_yaml();
}

MediaSize training_size(const SampleKeys& keys, int64_t resolution, const Family& family) {
  if (!family.spec().videos()) return {resolution, resolution};
  return sample_size(keys, resolution, family);
}

int64_t global_batch(double per_device, int64_t devices, const char* key) {
  double n = per_device * static_cast<double>(devices);
  check(n >= 1 && n == std::floor(n), Code::invalid_config,
        "{} is {}; on {} {} that is {} images, expected a whole number", key, per_device, devices,
        devices == 1 ? "device" : "devices", n);
  return static_cast<int64_t>(n);
}

int64_t global_batch(const BatchKeys& keys, int64_t devices) {
  check(keys.global_batch_size >= 0, Code::invalid_config, "global_batch_size is {}; expected 0 or more images",
        keys.global_batch_size);
  return keys.global_batch_size > 0 ? keys.global_batch_size : global_batch(keys.per_device_batch_size, devices);
}

int64_t part_of_replica(int64_t batch, int64_t replicas) {
  check(batch % replicas == 0, Code::invalid_config, "batch of {} samples; expected a multiple of the {} processes",
        batch, replicas);
  return batch / replicas;
}

}  // namespace md
