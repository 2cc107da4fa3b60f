// Checkpoints that may be damaged: all of them, and how one is renamed out of the way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// All folders with the name of a checkpoint, complete or not, ascending.
std::vector<int64_t> checkpoint_folders(const std::string& checkpoint_dir);
/// Renames a damaged checkpoint to a name that is not listed, "<step>.damaged", or with a number behind that where
/// there is one; returns its new path.
std::string set_aside(const std::string& checkpoint_dir, int64_t step);

}  // namespace md
