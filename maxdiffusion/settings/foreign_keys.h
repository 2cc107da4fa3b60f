// Keys of other programs (diffusers' training scripts, kohya's, user interfaces) that are called otherwise here.
#pragma once

#include <map>
#include <string>

namespace md {

/// Their name → the sentence that names ours.
const std::map<std::string, std::string>& foreign_keys();

}  // namespace md
