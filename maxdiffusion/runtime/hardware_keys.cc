#include "maxdiffusion/runtime/hardware_keys.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

/// Throws invalid_config unless CPU processes shard only batches.
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

/// Key-value store of the processes for their clients.
class OfProcesses final : public pjrt::KeyValues {
 public:
  void put(const std::string& key, const std::string& value) override { processes().put(prefix_ + key, value); }
  std::optional<std::string> get(const std::string& key) override { return processes().get(prefix_ + key); }

 private:
  static std::string next() {
    static std::atomic<int64_t> clients = 0;
    return fmt::format("client {}: ", clients++);
  }
  const std::string prefix_ = next();  // all processes open the same clients in the same order
};

/// Number of GPUs on this host; 0: unknown.
int64_t visible_gpus() {
  const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
  if (const std::string list = chosen ? chosen : ""; !list.empty()) return std::ranges::count(list, ',') + 1;
  int64_t n = 0;
  std::error_code ec;
  for (const auto& f : std::filesystem::directory_iterator("/dev", ec)) {
    const std::string name = f.path().filename();
    n += name.starts_with("nvidia") && name.size() > 6 && name.find_first_not_of("0123456789", 6) == name.npos;
  }
  return n;
}

pjrt::Options options_of(const HardwareKeys& keys, Processes& all) {
  pjrt::Options options;
  if (keys.hardware == "cpu") options["cpu_device_count"] = keys.cpu_device_count;
  if (keys.hardware != "gpu" || all.alone()) return options;
  options["node_id"] = all.rank();
  options["num_nodes"] = all.count();
  const LocalRank local = local_rank(all);
  if (std::vector<int64_t> gpus = gpus_of_process(local.rank, local.count, visible_gpus()); !gpus.empty())
    options["visible_devices"] = std::move(gpus);
  return options;
}

/// Checks that a client's processes are those that the launcher started.
void check_joint(const Devices& devices, Processes& all) {
  const std::set<int> of(devices.processes().begin(), devices.processes().end());
  if (all.alone()) {
    if (devices.joint())
      throw Error(Code::invalid_config,
                  fmt::format("the devices belong to {} processes that are not connected", of.size()))
          .note("try: an MPI launcher, which starts the program on every host: mpiexec -hosts …, or srun --mpi=pmi2");
    return;
  }
  check(static_cast<int64_t>(of.size()) == all.count() && devices.process() == all.rank(), Code::device,
        "the launcher has started this process as {} of {}, but the plugin reports process {} of {}", all.rank(),
        all.count(), devices.process(), of.size());
  check(devices.processes().front() == 0, Code::invalid_config,
        "the first device of the mesh belongs to process {}; expected process 0, which writes checkpoints",
        devices.processes().front());
}

}  // namespace

std::vector<int64_t> gpus_of_process(int64_t rank, int64_t count, int64_t visible) {
  if (count == 1) return {};
  if (visible == 0) return {rank};
  if (visible == 1) return {0};  // the launcher assigns one to each process
  check(visible % count == 0, Code::invalid_config,
        "{} GPUs do not divide into equal parts for the {} processes of this host; start as many as divide them",
        visible, count);
  std::vector<int64_t> gpus;
  for (int64_t i = 0; i < visible / count; ++i) gpus.push_back(rank * (visible / count) + i);
  return gpus;
}

std::shared_ptr<pjrt::Client> open_client(const HardwareKeys& keys) {
  check(keys.topology.empty(), Code::invalid_config,
        "topology is '{}': programs run on attached hardware only; try: the command compile, or an empty topology",
        keys.topology);
  check(keys.gpu_type.empty(), Code::invalid_config,
        "gpu_type is '{}'; expected empty: it belongs to the topology of compile and plan", keys.gpu_type);
  Processes& all = processes();
  const bool shares = keys.hardware == "gpu" && !all.alone();
  try {
    return pjrt::Client::open(keys.hardware, options_of(keys, all), keys.plugin,
                              shares ? std::make_shared<OfProcesses>() : nullptr);
  } catch (Error& e) {
    throw e.note(fmt::format("hardware is {}", keys.hardware));
  }
}

Devices open_devices(const std::shared_ptr<pjrt::Client>& client, const HardwareKeys& keys, const MeshConfig& mesh,
                     AxisRules rules) {
  Processes& all = processes();
  Devices devices(client, Mesh::make(mesh, topology(*client)), std::move(rules));
  if (keys.hardware == "cpu" && !all.alone()) {
    check_slices(mesh, all.count());
    devices.set_replica(all.rank(), all.count());
    log_info("Found {}: {} processes, each {}", counted(devices.count(), "device"), all.count(),
             devices.mesh().describe());
    return devices;
  }
  check_joint(devices, all);
  if (devices.joint())
    log_info("this process has {} of the devices; there are {} processes", devices.local().size(), all.count());
  log_info("Found {}: {}", counted(devices.mesh().devices(), "device"), devices.mesh().describe());
  return devices;
}

Devices open_devices(const HardwareKeys& keys, const MeshConfig& mesh, const ShardingKeys& sharding,
                     const std::string& of_family) {
  const std::shared_ptr<pjrt::Client> client = open_client(keys);
  return open_devices(client, keys, mesh, AxisRules::for_family(sharding, mesh.axes(), of_family));
}

}  // namespace md
