#include "maxdiffusion/tasks/run_config.h"

#include <cmath>
#include <cstdlib>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/storage/location.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/attention.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md {

RunConfig RunConfig::load(const std::string& file, const std::vector<std::string>& overrides) {
  return from_source(ConfigSource::load(file, overrides));
}

RunConfig RunConfig::from_source(const ConfigSource& source) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  keys.assign(source);
  c.reference.judge();
  if (const char* job = std::getenv("JOBSET_NAME"); job && c.run.run_name.empty()) c.run.run_name = job;
  if (c.run.output_dir.empty()) c.run.output_dir = c.run.base_output_directory;
  for (const auto& [key, place] :
       {std::pair{"output_dir", &c.run.output_dir}, std::pair{"base_output_directory", &c.run.base_output_directory},
        std::pair{"jax_cache_dir", &c.compile.jax_cache_dir}, std::pair{"metrics_file", &c.metrics.metrics_file},
        std::pair{"timing_metrics_file", &c.run.timing_metrics_file},
        std::pair{"dataset_save_location", &c.data.dataset_save_location}})
    check(place->find("://") == std::string::npos, Code::invalid_config,
          "{} is '{}', but only folders are written to; mount the bucket and name its folder", key, *place);
  // Names are checked before anything starts, each by the list that knows it.
  for (const std::string* name : {&c.model.weights_dtype, &c.model.activations_dtype})
    check(is_float(parse_dtype(*name)), Code::invalid_config, "dtype '{}' of weights or activations is no float",
          *name);
  check_attention_kernel(c.model.attention);
  remat_policy(c.model.remat_policy);
  learning_rate(c.optim, int64_t{0});
  pjrt::platform_for(c.run.hardware);
  check(c.model.precision == "DEFAULT" || c.model.precision == "HIGH" || c.model.precision == "HIGHEST",
        Code::invalid_config, "precision '{}' is not one of: DEFAULT, HIGH, HIGHEST", c.model.precision);
  check(c.data.caption_dropout >= 0 && c.data.caption_dropout < 1, Code::invalid_config,
        "caption_dropout {} is not in [0, 1)", c.data.caption_dropout);
  check(c.loss.ema_decay >= 0 && c.loss.ema_decay < 1, Code::invalid_config, "ema_decay {} is not in [0, 1)",
        c.loss.ema_decay);
  for (const auto& [key, value] :
       {std::pair{"train_data_dir", c.data.train_data_dir}, std::pair{"hf_train_files", c.data.hf_train_files},
        std::pair{"hf_data_dir", c.data.hf_data_dir}, std::pair{"grain_train_files", c.data.grain_train_files},
        std::pair{"dataset_name", c.data.dataset_name}, std::pair{"data_files_pattern", c.data.data_files_pattern},
        std::pair{"conditioning_data_dir", c.data.conditioning_data_dir},
        std::pair{"eval_data_dir", c.eval.eval_data_dir},
        std::pair{"instance_data_dir", c.dreambooth.instance_data_dir},
        std::pair{"class_data_dir", c.dreambooth.class_data_dir}}) {
    check(!has_secret(value), Code::invalid_config,
          "{} holds a secret key, which would be saved with the run; say it by AWS_ACCESS_KEY_ID and "
          "AWS_SECRET_ACCESS_KEY",
          key);
  }
  check(c.data.resolution > 0, Code::invalid_config, "resolution {} is not a positive number", c.data.resolution);
  return c;
}

std::string RunConfig::to_yaml() const {
  KeyList keys;
  RunConfig copy = *this;
  copy.data.hf_access_token.clear();  // what is printed and saved is read by others
  keys.add(copy);
  return keys.to_yaml();
}

std::string RunConfig::folder() const {
  check(!run.run_name.empty(), Code::invalid_config, "run_name is empty; give run_name=NAME");
  check(!run.output_dir.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  return run.output_dir + "/" + run.run_name;
}

namespace {

AxisRules axis_rules(const RunConfig& c) {
  auto given = [](const JsonText& t) { return !t.text.empty() && t.text != "null" && t.text != "[]"; };
  AxisRules rules = given(c.run.logical_axis_rules) ? AxisRules::parse(c.run.logical_axis_rules.text, c.mesh.mesh_axes)
                                                    : AxisRules::unet();
  if (!given(c.run.data_sharding)) return rules;
  // One list of axes, which is dim 0's of every batch; the built-in rules take fewer where not all divide.
  const std::string& text = c.run.data_sharding.text;
  const AxisRules batch =
      AxisRules::parse(fmt::format("[['{}', {}]]", axis::kData, text.substr(1, text.size() - 2)), c.mesh.mesh_axes);
  std::vector<AxisRule> all = rules.rules();
  if (batch.rules()[0].mesh != c.mesh.mesh_axes) all.insert(all.begin(), batch.rules()[0]);
  return AxisRules(all);
}

}  // namespace

Devices open_devices(const RunConfig& c) {
  pjrt::Options options;
  if (c.run.hardware == "cpu") options["cpu_device_count"] = c.run.cpu_device_count;
  auto client = pjrt::Client::open(c.run.hardware, options, c.run.plugin);
  Devices devices(client, Mesh::make(c.mesh, topology(*client)), axis_rules(c));
  log_info("Found {} devices: {}", devices.mesh().devices(), devices.mesh().describe());
  return devices;
}

ScopeOptions scope_options(const ModelKeys& m) {
  return {.weights = parse_dtype(m.weights_dtype),
          .activations = parse_dtype(m.activations_dtype),
          .precision = m.precision == "HIGHEST" ? Precision::highest
                       : m.precision == "HIGH"  ? Precision::high
                                                : Precision::default_,
          .attention = m.attention,
          .flash_min_seq_length = m.flash_min_seq_length,
          .remat = m.remat_policy,
          .scan_layers = m.scan_layers};
}

int64_t global_batch(double per_device, int64_t devices, const char* key) {
  double n = per_device * static_cast<double>(devices);
  check(n >= 1 && n == std::floor(n), Code::invalid_config,
        "{} {} times {} devices is {}, not a whole number of pictures", key, per_device, devices, n);
  return static_cast<int64_t>(n);
}

}  // namespace md
