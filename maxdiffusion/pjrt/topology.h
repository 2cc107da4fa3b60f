// Topology: hardware that is described but not attached, to compile for ("v5p:2x2x1" through libtpu, "1x1x8" through
// the CUDA plugin: partitions joined by a network, hosts of each, GPUs of each).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/executable.h"

namespace md::pjrt {

class Topology {
 public:
  /// `name`: a topology of the plugin of `hardware`; `slices`: number of slices; `device`: GPU model such as h100, if
  /// `hardware` is gpu. Throws device with the plugin's words, invalid_config for an unknown GPU.
  static Topology create(const std::string& hardware, const std::string& name, const std::string& plugin_path = "",
                         int64_t slices = 1, const std::string& device = "");
  Topology(Topology&&) noexcept;
  ~Topology();

  const Plugin& plugin() const { return *plugin_; }
  const PlatformDef& platform() const { return *platform_; }
  const std::string& platform_name() const { return platform_name_; }
  const std::string& platform_version() const { return platform_version_; }
  const std::vector<Device>& devices() const { return devices_; }
  /// Compiled but not loaded: memory and cost are available, it cannot run.
  Compiled compile(std::string_view mlir, const CompileOptions& options) const;

 private:
  Topology(std::shared_ptr<Plugin> plugin, const PlatformDef& platform, const std::string& name,
           const Options& options);
  std::shared_ptr<Plugin> plugin_;
  void* handle_ = nullptr;  // PJRT_TopologyDescription*
  const PlatformDef* platform_;
  std::string platform_name_, platform_version_;
  std::vector<Device> devices_;
};

}  // namespace md::pjrt
