// Combinations of keys that are not supported (compatibility.cc), and keys that a run does not read (ignored_keys.cc):
// one table and one message form for each.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/pipelines/sample_request.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

/// The context in which keys are read: the opened models of a run.
struct OpenedModels {
  const ModelFolder& folder;
  const Family& family;
  const Devices& devices;
  MediaSize samples;  // size of the generated samples
};

/// The rules for one config's keys. Messages name the keys.
class KeyRules {
 public:
  explicit KeyRules(const RunConfig& config) : config_(std::make_shared<const RunConfig>(config)) {}
  /// Throws invalid_config, naming the keys and the reason, for combinations that training does not support.
  void check_training(const Family& family) const;
  /// Likewise for prepare_tfrecords.
  void check_tfrecords() const;
  /// Warns of each key that has no effect in this run although it is set: it differs from its default, or is on the
  /// command line, but its switch is off or the model does not use it. Keys of other commands, such as training keys in
  /// a config for sampling, cause a warning only if they are on the command line. Warnings name the keys first.
  /// `command`: train, generate or prepare_tfrecords.
  void warn_of_ignored(const OpenedModels& opened, std::string_view command) const;
  /// The texts of these warnings for a request to a server that sets the keys `set_keys`, and whose other keys are
  /// those of the config.
  std::vector<std::string> ignored_in(const SampleRequest& request, const std::set<std::string>& set_keys,
                                      const OpenedModels& opened) const;

 private:
  std::shared_ptr<const RunConfig> config_;
};

}  // namespace md
