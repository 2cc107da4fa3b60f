// YAML from text, with limits: the only caller of yaml-cpp's parser.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace md {

/// Parses the first document. Throws YAML::Exception, also for more than 16 MiB of text, recursive aliases (`&a [*a]`),
/// aliases that expand to more than a million values or 512 levels, and tags of types that YAML does not define.
YAML::Node load_yaml(const std::string& text);

}  // namespace md
