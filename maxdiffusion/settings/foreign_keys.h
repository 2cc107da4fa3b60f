// Keys of other programs (diffusers' training scripts, kohya's, user interfaces) that have another name in this
// program.
#pragma once

#include <map>
#include <string>

namespace md {

/// Foreign name → a sentence that names this program's key.
const std::map<std::string, std::string>& foreign_keys();

}  // namespace md
