// Keys of other programs (diffusers' training scripts, kohya's, user interfaces) that have another name here.
#pragma once

#include <map>
#include <string>

namespace md {

/// Their name → the sentence that names ours.
const std::map<std::string, std::string>& foreign_keys();

}  // namespace md
