// Weights whose headers were read for a check, kept open until they are loaded.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {

/// Holds the files of each component from the check until the first load, which removes them, so that no file stays
/// mapped longer than needed. Thread safe.
class OpenedWeights {
 public:
  using File = std::shared_ptr<const SafetensorsReader>;
  /// `path`: as in SafetensorsReader::open.
  static File open(const std::string& path) {
    return std::make_shared<const SafetensorsReader>(SafetensorsReader::open(path));
  }
  void keep(const std::string& component, const std::string& path, File file);
  /// The file kept for this path, removed from here; if there is none, opens it.
  File take(const std::string& component, const std::string& path);

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, File> cached_;  // component and path
};

}  // namespace md
