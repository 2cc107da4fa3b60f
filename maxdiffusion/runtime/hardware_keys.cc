#include "maxdiffusion/runtime/hardware_keys.h"

#include "maxdiffusion/base/log.h"

namespace md {

Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, AxisRules rules) {
  pjrt::Options options;
  if (keys.hardware == "cpu") options["cpu_device_count"] = keys.cpu_device_count;
  auto client = pjrt::Client::open(keys.hardware, options, keys.plugin);
  Devices devices(client, Mesh::make(mesh, topology(*client)), std::move(rules));
  log_info("Found {} devices: {}", devices.mesh().devices(), devices.mesh().describe());
  return devices;
}

}  // namespace md
