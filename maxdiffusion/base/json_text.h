// JsonText: a config value that its reader parses.
#pragma once

#include <string>

namespace md {

/// Any YAML value (a table of axis rules), as one line of flow text.
struct JsonText {
  std::string text;
  bool operator==(const JsonText&) const = default;
};

}  // namespace md
