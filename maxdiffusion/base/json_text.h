// JsonText: a value of a config that its reader parses.
#pragma once

#include <string>

namespace md {

/// A value kept as it is written: any YAML (a table of axis rules, say), as one line of flow text.
struct JsonText {
  std::string text;
  bool operator==(const JsonText&) const = default;
};

}  // namespace md
