#include "maxdiffusion/tasks/run_config.h"

#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {

RunConfig RunConfig::load(const std::string& file, const std::vector<std::string>& overrides) {
  return from_source(ConfigSource::load(file, overrides));
}

RunConfig RunConfig::from_source(const ConfigSource& source) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  keys.assign(source);
  check(c.model.precision == "DEFAULT" || c.model.precision == "HIGH" || c.model.precision == "HIGHEST",
        Code::invalid_config, "precision '{}' is not one of: DEFAULT, HIGH, HIGHEST", c.model.precision);
  check(c.data.caption_dropout >= 0 && c.data.caption_dropout < 1, Code::invalid_config,
        "caption_dropout {} is not in [0, 1)", c.data.caption_dropout);
  check(c.loss.ema_decay >= 0 && c.loss.ema_decay < 1, Code::invalid_config, "ema_decay {} is not in [0, 1)",
        c.loss.ema_decay);
  check(c.data.resolution > 0, Code::invalid_config, "resolution {} is not a positive number", c.data.resolution);
  return c;
}

std::string RunConfig::to_yaml() const {
  KeyList keys;
  RunConfig copy = *this;
  keys.add(copy);
  return keys.to_yaml();
}

std::string RunConfig::folder() const {
  check(!run.run_name.empty(), Code::invalid_config, "run_name is empty; give run_name=NAME");
  check(!run.output_dir.empty(), Code::invalid_config, "output_dir is empty; give output_dir=FOLDER");
  return run.output_dir + "/" + run.run_name;
}

int64_t global_batch(double per_device, int64_t devices, const char* key) {
  double n = per_device * static_cast<double>(devices);
  check(n >= 1 && n == std::floor(n), Code::invalid_config,
        "{} {} times {} devices is {}, not a whole number of pictures", key, per_device, devices, n);
  return static_cast<int64_t>(n);
}

}  // namespace md
