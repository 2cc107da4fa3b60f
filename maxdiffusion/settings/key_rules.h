// What the keys of a config may not be together (compatibility.cc), and which of them a run does not read
// (ignored_keys.cc): one table and one message form for each.
#pragma once

#include <memory>
#include <string_view>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

/// The context in which keys are read: the opened models of a run.
struct OpenedModels {
  const ModelFolder& folder;
  const Family& family;
  const Devices& devices;
  MediaSize samples;  // size of what is sampled
};

/// The rules over one config's keys. It names the keys that break them.
class KeyRules {
 public:
  explicit KeyRules(const RunConfig& config) : config_(std::make_shared<const RunConfig>(config)) {}
  /// Throws invalid_config, naming the keys and the reason, for what training does not support.
  void check_training(const Family& family) const;
  /// Throws the same for what prepare_tfrecords does not support.
  void check_tfrecords() const;
  /// Warns, naming the keys first, of each that is not its default, or stands on the command line, and is without
  /// effect in this run: its switch is off, or the model has nothing that reads it. Keys that another command reads, as
  /// those of training in a config that samples, are named where they stand on the command line only. `command`: train,
  /// generate or prepare_tfrecords.
  void warn_of_ignored(const OpenedModels& opened, std::string_view command) const;

 private:
  std::shared_ptr<const RunConfig> config_;
};

}  // namespace md
