// Device profiles recorded by a plugin.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

/// One profile: records from construction on. The client must outlive it.
class Profiler {
 public:
  /// None if the plugin has no profiler (CPU plugins). Throws device with the plugin's words.
  static std::unique_ptr<Profiler> start(const Client& client);
  ~Profiler();
  /// A serialized XSpace. Call once. Throws device.
  std::string stop();

 private:
  struct Impl;
  explicit Profiler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace md::pjrt
