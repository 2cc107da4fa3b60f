// What a plugin records of its devices while a profile is taken.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {

/// One profile: records from construction on. The client must outlive it.
class Profiler {
 public:
  /// Nothing where the plugin cannot record (no CPU plugin can). Throws device with the plugin's words.
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
