// Devices: client and mesh together, and the properties of these that graphs need.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/median.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/kernels/processor.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/pjrt/ffi.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

namespace {

Topology describe(const std::string& platform, const std::vector<pjrt::Device>& devices) {
  Topology t{.platform = platform,
             .device_kind = devices.front().kind,
             .devices = {},
             .compute_capability = devices.front().compute_capability};
  for (const pjrt::Device& d : devices)
    t.devices.push_back({.id = d.id, .process = d.process, .slice = d.slice, .coords = d.coords});
  return t;
}

Platform platform_of(const std::string& name) {
  if (name == "cpu") return Platform::cpu;
  if (name == "tpu") return Platform::tpu;
  return Platform::gpu;  // "cuda", "rocm", "gpu"
}

/// A CPU plugin may emulate GPUs in tests.
bool calls_cpu_kernels(const pjrt::Client& client) {
  return client.platform_name() == "cpu" && client.platform().hardware == std::string_view("cpu") &&
         pjrt::supports_ffi_handlers(client);
}

/// GraphOptions::measure, on the first device of this process.
double seconds_alone(const std::shared_ptr<pjrt::Client>& client, const Graph& graph, int64_t runs) {
  Topology first = topology(*client);
  std::erase_if(first.devices, [&](const DeviceInfo& d) { return !client->device(d.id).addressable; });
  first.devices.resize(1);
  first.devices.front().slice = 0;
  const Devices device(client, Mesh::make({}, first));
  const Program program = compile(device, graph, {.jax_cache_dir = "off"}, "tile_search");
  ArrayMap inputs;
  for (const GraphInput& in : graph.inputs()) {
    HostArray zeros(in.value.shape());
    std::memset(zeros.mutable_data(), 0, zeros.bytes());
    inputs[in.name] = device.put(zeros, sharding_of(in), in.name);
  }
  std::vector<double> seconds;
  for (int64_t i = -1; i < runs; ++i) {  // the first run is slower
    const auto began = std::chrono::steady_clock::now();
    ArrayMap none;
    for (const auto& [name, array] : program.run(none, inputs))
      for (const pjrt::Buffer& shard : array.shards()) shard.wait();
    if (i >= 0) seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  return median(std::move(seconds));
}

}  // namespace

Axes filters_before_channels(const LogicalAxes& axes, const Dims& dims) {
  const std::string_view of_windows[] = {axis::kWindowFrames, axis::kWindowHeight, axis::kWindowWidth};
  const auto window = std::ranges::find_first_of(axes, of_windows);
  const auto is_one = [](int64_t d) { return d == 1; };
  if (std::all_of(dims.begin() + (window - axes.begin()), dims.end(), is_one)) return {};
  Axes order(axes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto out = order.begin() + (window - axes.begin()) - 2;
  std::rotate(out, out + 2, order.end());
  std::swap(order.back(), *(order.end() - 2));
  return order;
}

Topology topology(const pjrt::Client& client) { return describe(client.platform_name(), client.devices()); }
Topology topology(const pjrt::Topology& absent) { return describe(absent.platform_name(), absent.devices()); }

GraphOptions graph_options(const Mesh& mesh, const Topology& topology, const AxisRules* rules) {
  GraphOptions options;
  for (const MeshAxis& axis : mesh.axes())
    if (axis.size > 1) options.mesh_axes.emplace_back(axis.name, axis.size);
  if (rules)
    options.resolve = [rules = *rules, mesh](const LogicalAxes& axes, const Dims& dims) {
      return rules.resolve(mesh, axes, dims).dims;
    };
  options.platform = platform_of(topology.platform);
  if (options.platform == Platform::tpu) options.memory_order = filters_before_channels;
  options.device_kind = topology.device_kind;
  options.nvidia_kernels = topology.compute_capability >= 8;
  return options;
}

Devices::Devices(std::shared_ptr<pjrt::Client> client, Mesh mesh, AxisRules rules)
    : client_(std::move(client)), mesh_(std::move(mesh)), rules_(std::move(rules)), process_(client_->process_index()) {
  for (int id : mesh_.device_ids()) {
    const pjrt::Device& d = client_->device(id);
    if (d.addressable) local_.push_back(static_cast<int64_t>(processes_.size()));
    processes_.push_back(d.process);
  }
  check(!local_.empty(), Code::device, "mesh {}: no device belongs to process {}", mesh_.describe(), process_);
  if (calls_cpu_kernels(*client_))
    for (const Kernel& k : cpu_kernels()) pjrt::register_ffi_handler(*client_, k.name, k.handler);
}

Devices Devices::as_process(int process, std::vector<int> processes) const {
  check(processes.size() == mesh_.device_ids().size(), Code::internal, "mesh {}: processes of {} devices",
        mesh_.describe(), processes.size());
  Devices d = *this;
  d.process_ = process;
  d.processes_ = std::move(processes);
  d.local_.clear();
  for (size_t i = 0; i < d.processes_.size(); ++i)
    if (d.processes_[i] == process) d.local_.push_back(static_cast<int64_t>(i));
  return d;
}

Devices Devices::local_devices() const {
  if (!joint()) return *this;
  Topology local = topology(*client_);
  std::erase_if(local.devices, [&](const DeviceInfo& d) { return !client_->device(d.id).addressable; });
  for (DeviceInfo& d : local.devices) d.slice = 0;
  return Devices(client_, Mesh::make({}, local), rules_);
}

Devices Devices::open(const std::string& hardware, int64_t cpu_devices, const MeshConfig& config) {
  pjrt::Options options;
  if (hardware == "cpu") options["cpu_device_count"] = cpu_devices;
  auto client = pjrt::Client::open(hardware, options);
  Mesh mesh = client->devices().size() == 1 ? Mesh::single() : Mesh::make(config, topology(*client));
  return Devices(std::move(client), std::move(mesh));
}

Platform Devices::platform() const { return platform_of(client_->platform_name()); }

GraphOptions Devices::graph_options(const AxisRules* rules) const {
  GraphOptions options = md::graph_options(mesh_, topology(*client_), rules);
  if (calls_cpu_kernels(*client_))
    options.cpu_kernels = {
        .callable = true, .f32_products = processor().wide_vectors, .bf16_products = processor().bf16_products};
  if (!joint() && replicas_ == 1)
    options.measure = [client = client_](const Graph& graph, int64_t runs) {
      return seconds_alone(client, graph, runs);
    };
  return options;
}

std::vector<Slice> local_slices(const Devices& devices, const LogicalAxes& axes, const Dims& dims) {
  const Sharding sharding = devices.rules().resolve(devices.mesh(), axes, dims);
  std::vector<Slice> slices;
  for (int64_t device : devices.local()) {
    const Slice slice = shard_of(devices.mesh(), sharding, dims, device);
    if (std::ranges::find(slices, slice) == slices.end()) slices.push_back(slice);
  }
  return slices;
}

BatchShare share_of_program(const Devices& devices, int64_t rows) {
  return devices.batch_share(devices.rules().resolve(devices.mesh(), {axis::kData}, {rows}));
}

BatchShare share_of_update(const Devices& devices, int64_t samples, int64_t accumulation) {
  if (devices.replicas() == 1) return share_of_program(devices, samples);
  BatchShare share{devices.replica(), devices.replicas(), {}};
  for (int64_t i = 0; i < accumulation && accumulation > 1; ++i)
    share.parts.push_back(i * share.processes + share.process);
  return share;
}

void place(const Devices& devices, const Program& program, NamedShards values, ArrayMap& out) {
  Span span("to device");
  for (size_t i = 0; i < program.input_names().size(); ++i) {
    const std::string& name = program.input_names()[i];
    if (auto a = values.extract(name))
      out[name] = devices.put(
          a.mapped().shape, [&](const Slice& slice) { return a.mapped().take(slice); }, program.input_sharding(i),
          name);
  }
}

void place(const Devices& devices, const Program& program, HostArrays values, ArrayMap& out) {
  place(devices, program, as_shards(std::move(values)), out);
}

}  // namespace md
