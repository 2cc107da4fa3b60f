// Damaged checkpoints: listing all checkpoints, and renaming a damaged one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// All folders with the name of a checkpoint, complete or not, ascending. Throws io if `checkpoint_dir` is there but
/// cannot be read.
std::vector<int64_t> checkpoint_folders(const std::string& checkpoint_dir);
/// Renames a damaged checkpoint to "<step>.damaged", a name that is not listed; appends a number if that exists.
/// Returns the new path.
std::string quarantine(const std::string& checkpoint_dir, int64_t step);

}  // namespace md
