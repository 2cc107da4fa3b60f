// Keys of the devices that a run takes.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct HardwareKeys {
  std::string hardware = "cpu", plugin, topology, compile_step = "training";
  int64_t cpu_device_count = 1, compile_topology_num_slices = -1;
  template <class V>
  void visit(V&& v) {
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`");
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin");
    v("topology", topology, "for compile: the TPUs of a slice that is not attached, as v5p:4x4x4");
    v("compile_step", compile_step, "for compile and plan: training or sampling");
    v("compile_topology_num_slices", compile_topology_num_slices, "for compile: slices of that topology; <= 0: 1");
  }
};

/// The devices of `hardware` as the mesh keys arrange them. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, AxisRules rules);

}  // namespace md
