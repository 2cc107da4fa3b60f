// Former names of this program's keys: configs and commands with them still work, and a log line names the current key.
#pragma once

#include <vector>

#include "maxdiffusion/config/config.h"

namespace md {

/// For ConfigSource::rename.
const std::vector<KeyRename>& renamed_keys();

}  // namespace md
