// Keys that a run does not read, each with the reason: one table, one message form. What cannot be combined at all is
// in compatibility.h.
#pragma once

#include <string_view>

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// What the keys are read beside: the models of a run, opened.
struct OpenedModels {
  const RunConfig& config;
  const ModelFolder& folder;
  const Family& family;
  const Devices& devices;
  MediaSize samples;  // size of what is sampled
};
/// Warns, naming the keys first, of each that is not its default, or stands on the command line, and is without effect
/// in this run: its switch is off, or the model has nothing that reads it. Keys that another command reads, as those of
/// training in a config that samples, are named where they stand on the command line only. `command`: train, generate
/// or prepare_tfrecords.
void warn_of_ignored_keys(const OpenedModels& opened, std::string_view command);

}  // namespace md
