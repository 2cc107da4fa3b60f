#include "maxdiffusion/runtime/hardware_keys.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

/// Processes are slices that only batches are split over.
void check_slices(const MeshConfig& c, int64_t processes) {
  const std::pair<const char*, int64_t> others[] = {{"dcn_fsdp_parallelism", c.dcn_fsdp_parallelism},
                                                    {"dcn_fsdp_batch_parallelism", c.dcn_fsdp_batch_parallelism},
                                                    {"dcn_context_parallelism", c.dcn_context_parallelism},
                                                    {"dcn_tensor_parallelism", c.dcn_tensor_parallelism}};
  for (const auto& [key, size] : others)
    if (size > 1)
      throw Error(Code::invalid_config, fmt::format("{} is {}, but of processes on CPUs each has its own devices, and "
                                                    "only batches are split over them",
                                                    key, size))
          .note(fmt::format("try: {}=1 and dcn_data_parallelism={}", key, processes));
  const int64_t data = c.dcn_data_parallelism;
  if (data != -1 && data != 1 && data != processes)
    throw Error(Code::invalid_config,
                fmt::format("dcn_data_parallelism is {}, but {} processes were started", data, processes))
        .note("try: dcn_data_parallelism=-1, which is their number");
}

}  // namespace

Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, AxisRules rules) {
  pjrt::Options options;
  if (keys.hardware == "cpu") options["cpu_device_count"] = keys.cpu_device_count;
  auto client = pjrt::Client::open(keys.hardware, options, keys.plugin);
  Devices devices(client, Mesh::make(mesh, topology(*client)), std::move(rules));
  Processes& all = processes();
  if (!all.alone()) {
    check_slices(mesh, all.count());
    devices.set_replica(all.rank(), all.count());
    log_info("Found {} devices: {} processes, each {}", devices.count(), all.count(), devices.mesh().describe());
    return devices;
  }
  log_info("Found {} devices: {}", devices.mesh().devices(), devices.mesh().describe());
  return devices;
}

}  // namespace md
