// Values of keys that no run can use, and seeds that are drawn.
#pragma once

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Throws invalid_config naming the first key whose number is out of its range.
void check_values(const RunConfig& config);
/// The config with a number in place of seed and sample_seed where they are -1, with a line in the log. A run that is
/// there already has drawn its seed: it is in the config.yml of its folder, and is taken again.
RunConfig with_drawn_seeds(RunConfig config);

}  // namespace md
