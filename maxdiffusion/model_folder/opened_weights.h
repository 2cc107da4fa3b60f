// Weights whose headers were read to check something, kept open until they are loaded.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {

/// The files of each component from the check until the first load, which takes them, so that no file stays in the
/// address space longer than it is read. Thread safe.
class OpenedWeights {
 public:
  using File = std::shared_ptr<const SafetensorsReader>;
  /// `path` as SafetensorsReader::open takes it.
  static File open(const std::string& path) {
    return std::make_shared<const SafetensorsReader>(SafetensorsReader::open(path));
  }
  void keep(const std::string& component, const std::string& path, File file);
  /// What was kept of this path, once; otherwise it is opened now.
  File take(const std::string& component, const std::string& path);

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, File> kept_;  // component and path
};

}  // namespace md
