// The key-value store of a multi-process run. Plugins with multi-process clients (GPUs) exchange addresses through it
// when the client is created and when a program first uses a group of devices.
#pragma once

#include <optional>
#include <string>

namespace md::pjrt {

/// Thread safe. A key is set once in a run.
class KeyValues {
 public:
  virtual ~KeyValues() = default;
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// None if it is not set yet.
  virtual std::optional<std::string> get(const std::string& key) = 0;
};

}  // namespace md::pjrt
