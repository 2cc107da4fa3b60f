// Keys that changed since the run was last started.
#pragma once

#include <optional>

#include "maxdiffusion/settings/run_info.h"

namespace md {

/// The keys that an earlier start of the run has written into the config.yml of its folder; none: it has not. A file
/// that does not read is a warning.
std::optional<RunConfig> config_of_run(const RunInfo& run);
/// Where the run has checkpoints: a warning for each key that changes training and differs from the config.yml
/// there, and one info line for the others. The seed is left out: resuming says so itself.
void report_changed_keys(const RunInfo& run);

}  // namespace md
