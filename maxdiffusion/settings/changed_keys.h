// Keys that changed since the run was last started.
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

}  // namespace md
