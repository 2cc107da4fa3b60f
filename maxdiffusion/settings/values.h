// Values of keys that no run can use.
#pragma once

#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Throws invalid_config naming the first key whose number is out of its range.
void check_values(const RunConfig& config);

}  // namespace md
