// Keys of the devices that a run takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct HardwareKeys {
  std::string hardware = "cpu", plugin, topology, gpu, compile_step = "training";
  int64_t cpu_device_count = 1, compile_topology_num_slices = -1;
  template <class V>
  void visit(V&& v) {
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`", KeyPath::input);
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin", in_range(1, 1024));
    v("compile_step", compile_step, "for compile and plan: which program", one_of({"training", "sampling"}));
    v("topology", topology,
      "for compile and plan: devices that are not attached: TPUs of a slice, as v5p:4x4x4; with hardware gpu 1x1x8: "
      "NVLink domains, hosts of each, GPUs of each");
    v("gpu", gpu, "for compile and plan: what the GPUs of that topology are: a100, h100, h200, b200");
    v("compile_topology_num_slices", compile_topology_num_slices, "for compile: slices of that topology; <= 0: 1");
  }
};

/// The devices of `hardware` as the mesh keys arrange them. CPU devices of several processes (processes/processes.h)
/// are replicas; between them only dcn_data_parallelism may split, and it is their number. GPUs and TPUs of several
/// processes are one mesh, of which each process gives work to its own. Throws as pjrt::Client::open and Mesh::make do.
Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, AxisRules rules);

/// Those on which a model runs, whose family has the axis rules `of_family`. Throws invalid_config for hardware that is
/// not attached.
Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, const ShardingKeys& sharding,
                     const std::string& of_family);

/// Which of the GPUs that its host shows a process takes, where it is number `rank` of `count` processes there: an
/// equal part, in their order. Empty: all of them. `visible`: how many there are; 0: nobody knows, and each takes one.
/// Throws invalid_config where they do not divide.
std::vector<int64_t> gpus_of_process(int64_t rank, int64_t count, int64_t visible);

}  // namespace md
