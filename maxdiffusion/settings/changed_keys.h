// Keys that changed since the run was last started, or that differ between the processes of a run.
#pragma once

#include <optional>

#include "maxdiffusion/settings/run_info.h"

namespace md {

/// The keys that an earlier start of the run wrote to the config.yml of its folder; none if there is no such file. An
/// unreadable file logs a warning.
std::optional<RunConfig> config_of_run(const RunInfo& run);
/// If the run has checkpoints, logs a warning for each key that affects training and differs from its config.yml, and
/// one info line for the other keys. The seed is excluded: resuming logs it.
void report_changed_keys(const RunInfo& run);

/// Throws invalid_config in all processes, naming the first key that differs with rank and both values, unless all have
/// the same keys. Only places of outputs and of the plugin may differ. `mine`: RunConfig::to_yaml. Collective.
void check_same_keys(const std::string& mine, Processes& all);

}  // namespace md
