// Keys of the devices that a run takes.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct HardwareKeys {
  std::string hardware = "cpu", plugin;
  int64_t cpu_device_count = 1;
  template <class V>
  void visit(V&& v) {
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`");
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin");
  }
};

/// The devices of `hardware` as the mesh keys arrange them. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, AxisRules rules);

}  // namespace md
