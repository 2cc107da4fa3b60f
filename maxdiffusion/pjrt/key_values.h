// Texts by key that all processes of a run see. Plugins whose clients are of several processes (GPUs) tell each other
// through them where they are, while the client is created and when a program first needs a group of devices.
#pragma once

#include <optional>
#include <string>

namespace md::pjrt {

/// Thread safe. A key is put once in a run.
class KeyValues {
 public:
  virtual ~KeyValues() = default;
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// Nothing: it is not there yet.
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

}  // namespace md::pjrt
