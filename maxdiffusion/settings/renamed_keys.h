// Keys of this program that had another name: configs and commands with it still work, and a log line names the new
// one.
#pragma once

#include <vector>

#include "maxdiffusion/config/config.h"

namespace md {

/// For ConfigSource::rename.
const std::vector<KeyRename>& renamed_keys();

}  // namespace md
