// Checkpoints that may be damaged: all there are, and how one is put out of the way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace md {

/// All folders of which the names say that they are checkpoints, whole or not, ascending.
std::vector<int64_t> checkpoint_folders(const std::string& checkpoint_dir);
/// Gives a damaged checkpoint a name that is not looked at, "<step>.damaged", or with a number behind that where there
/// is one; returns its new path.
std::string set_aside(const std::string& checkpoint_dir, int64_t step);

}  // namespace md
