// New files and folders under temporary names. What stands at such a name, left by a killed process or by somebody
// else, is neither followed nor overwritten, be it a link. Errors are io and name the path.
#pragma once

#include <string>

namespace md {

/// Makes an empty file of a new name next to `path`, which it is to replace.
std::string new_file_next_to(const std::string& path);
/// Makes an empty folder of a new name next to `path`, and the folders above it.
std::string new_folder_next_to(const std::string& path);

}  // namespace md
