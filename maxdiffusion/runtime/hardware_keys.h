// Keys of the devices of a run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

struct HardwareKeys {
  std::string hardware = "cpu", plugin, topology, gpu_type, compile_target = "training";
  int64_t cpu_device_count = 1, compile_topology_num_slices = -1;
  template <class V>
  void visit(V&& v) {
    v("hardware", hardware, "cpu, gpu or tpu");
    v("plugin", plugin, "path of a PJRT plugin; empty: the one of `hardware`", KeyPath::input);
    v("cpu_device_count", cpu_device_count, "virtual devices of the CPU plugin", in_range(1, 1024));
    v("compile_target", compile_target, "for compile and plan: which program", one_of({"training", "sampling"}));
    v("topology", topology,
      "for compile and plan: devices that are not attached: TPUs of a slice, as v5p:4x4x4; with hardware gpu 1x1x8: "
      "NVLink domains, hosts of each, GPUs of each");
    v("gpu_type", gpu_type, "for compile and plan: the GPUs of that topology: a100, h100, h200, b200");
    v("compile_topology_num_slices", compile_topology_num_slices, "for compile: slices of that topology; <= 0: 1");
  }
};

/// Opens the plugin and its devices. Throws as pjrt::Client::open does; invalid_config for unattached hardware.
std::shared_ptr<pjrt::Client> open_client(const HardwareKeys& keys);
/// The devices of a client with the mesh of the keys. CPU devices of several processes (processes/processes.h) are
/// replicas: between processes only dcn_data_parallelism may be above 1, and is their number. GPUs and TPUs of several
/// processes form one mesh. Throws as Mesh::make does.
Devices open_devices(const std::shared_ptr<pjrt::Client>& client, const HardwareKeys& keys, const MeshConfig& mesh,
                     AxisRules rules);
/// Like the above with a new client, for a model whose family has the axis rules `of_family`.
Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, const ShardingKeys& sharding,
                     const std::string& of_family);

/// The GPUs of the process with local rank `rank` of `count` on a host: an equal part, in order. Empty: all. `visible`:
/// number of GPUs; 0: unknown, one each. Throws invalid_config if they are not divisible.
std::vector<int64_t> gpus_of_process(int64_t rank, int64_t count, int64_t visible);

}  // namespace md
