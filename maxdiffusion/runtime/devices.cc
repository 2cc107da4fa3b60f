// Devices: client and mesh together, and what graphs need to know of them.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

Topology topology(const pjrt::Client& client) {
  Topology t{.platform = client.platform_name(), .device_kind = client.devices().front().kind, .devices = {}};
  for (const pjrt::Device& d : client.devices())
    t.devices.push_back({.id = d.id, .process = d.process, .slice = d.slice, .coords = d.coords});
  return t;
}

Devices::Devices(std::shared_ptr<pjrt::Client> client, Mesh mesh) : client_(std::move(client)), mesh_(std::move(mesh)) {
  for (size_t i = 0; i < mesh_.device_ids().size(); ++i)
    if (client_->device(mesh_.device_ids()[i]).addressable) local_.push_back(static_cast<int64_t>(i));
  check(!local_.empty(), Code::device, "mesh {}: no device belongs to process {}", mesh_.describe(),
        client_->process_index());
}

Devices Devices::open(const std::string& hardware, int64_t cpu_devices, const MeshConfig& config) {
  pjrt::Options options;
  if (hardware == "cpu") options["cpu_device_count"] = cpu_devices;
  auto client = pjrt::Client::open(hardware, options);
  Mesh mesh = client->devices().size() == 1 ? Mesh::single() : Mesh::make(config, topology(*client));
  return Devices(std::move(client), std::move(mesh));
}

Platform Devices::platform() const {
  const std::string& name = client_->platform_name();
  if (name == "cpu") return Platform::cpu;
  if (name == "tpu") return Platform::tpu;
  return Platform::gpu;  // "cuda", "rocm", "gpu"
}

GraphOptions Devices::graph_options(const AxisRules* rules) const {
  GraphOptions options;
  for (const MeshAxis& axis : mesh_.axes())
    if (axis.size > 1) options.mesh_axes.emplace_back(axis.name, axis.size);
  if (rules)
    options.resolve = [rules = *rules, mesh = mesh_](const LogicalAxes& axes, const Dims& dims) {
      return rules.resolve(mesh, axes, dims).dims;
    };
  options.platform = platform();
  options.device_kind = client_->devices().front().kind;
  return options;
}

}  // namespace md
