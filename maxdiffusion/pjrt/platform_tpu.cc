// TPUs. Peaks (bf16) and rates are those of a chip on the vendor's system architecture pages; from v4 on a chip is one
// device. A port's bandwidth is a chip's ICI bandwidth / number of ports (4; v4 and v5p 6); a mesh axis, a ring, uses
// two ports. Network bandwidth is a host's / its chips. The clock is the peak / the FLOPs that all matrix units do in a
// cycle: 4 units of 128 × 128 (v5e), 8 (v4, v5p), or 4 of 256 × 256 (v6e).
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

struct Chip {
  const char* kind;
  double bf16;
  DeviceRates rates;
};
constexpr Chip kV6e{"TPU v6e", 918e12, {1600e9, 200e9, 12.5e9, 1.75e9}},
    kV5e{"TPU v5e", 197e12, {819e9, 100e9, 3.125e9, 1.5e9}}, kV5p{"TPU v5p", 459e12, {2765e9, 200e9, 6.25e9, 1.75e9}},
    kV4{"TPU v4", 275e12, {1228e9, 100e9, 6.25e9, 1.05e9}};

const Chip* chip(std::string_view kind) {
  // Longer names first: v5p reports "TPU v5".
  constexpr std::pair<std::string_view, const Chip*> kKinds[] = {
      {"TPU v6 lite", &kV6e}, {"TPU v6e", &kV6e}, {"TPU v5 lite", &kV5e}, {"TPU v5e", &kV5e},
      {"TPU v5p", &kV5p},     {"TPU v5", &kV5p},  {"TPU v4", &kV4},
  };
  for (const auto& [name, found] : kKinds)
    if (kind.starts_with(name)) return found;
  return nullptr;
}

std::optional<double> peak(std::string_view kind, DType type) {
  const Chip* c = chip(kind);
  if (!c || type != DType::bf16) return {};
  return c->bf16;
}

std::optional<DeviceRates> rates(std::string_view kind) {
  const Chip* c = chip(kind);
  if (!c) return {};
  return c->rates;
}

/// Supported from the seventh generation on.
bool has_float8(const Device& device) {
  constexpr std::string_view kBefore[] = {"TPU v2", "TPU v3", "TPU v4", "TPU v5", "TPU v6"};
  return std::ranges::none_of(kBefore, [&](std::string_view kind) { return device.kind.starts_with(kind); });
}

std::string first_line(const std::filesystem::path& file) {
  std::string line;
  std::getline(std::ifstream(file) >> std::ws, line);
  return line;
}

/// Chips are visible as /dev/accel0 … or, in newer generations, as /dev/vfio/0 …, and as Google's devices on the PCI
/// bus, as are that cloud's network cards and disks. Environment variables say if a runtime is elsewhere, or if the
/// machine is known to be a TPU's.
std::string absent(const std::string& root) {
  namespace fs = std::filesystem;
  for (const char* name : {"TPU_NAME", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE"})
    if (const char* value = std::getenv(name); value && *value) return "";
  std::error_code ec;
  for (const auto& [folder, prefix] : {std::pair{"/dev", "accel"}, {"/dev/vfio", ""}})
    for (const auto& f : fs::directory_iterator(root + folder, ec)) {
      const std::string number = f.path().filename().string();
      const size_t at = std::string_view(prefix).size();
      if (number.starts_with(prefix) && number.size() > at && number.find_first_not_of("0123456789", at) == number.npos)
        return "";
    }
  constexpr std::string_view kGoogle = "0x1ae0", kOthers[] = {"0x001f", "0x0042"};  // disk, network card
  for (const auto& f : fs::directory_iterator(root + "/sys/bus/pci/devices", ec))
    if (first_line(f.path() / "vendor") == kGoogle && std::ranges::count(kOthers, first_line(f.path() / "device")) == 0)
      return "";
  return "this machine has no TPU: there is no /dev/accel0, no /dev/vfio/0 and none on the PCI bus";
}

/// MaxDiffusion's flags for Wan on v5p, for sampling and light work, for several hosts, and for Ulysses.
std::vector<FlagSet> flag_sets() {
  // MaxDiffusion's documentation has `true`. Together with xla_tpu_overlap_compute_collective_tc this gave wrong
  // results (jax#38741); libtpu now rejects the combination except on v5e.
  constexpr const char* kRefused = "false";
  return {
      {"wan_v5p_train",
       {{"xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"},
        {"xla_tpu_megacore_fusion_allow_ags", "false"},
        {"xla_enable_async_collective_permute", "true"},
        {"xla_tpu_enable_ag_backward_pipelining", "true"},
        {"xla_tpu_enable_data_parallel_all_reduce_opt", "true"},
        {"xla_tpu_data_parallel_opt_different_sized_ops", "true"},
        {"xla_tpu_enable_async_collective_fusion", kRefused},
        {"xla_tpu_enable_async_collective_fusion_multiple_steps", "true"},
        {"xla_tpu_overlap_compute_collective_tc", "true"},
        {"xla_enable_async_all_gather", "true"},
        {"xla_tpu_scoped_vmem_limit_kib", "65536"},
        {"xla_tpu_enable_async_all_to_all", "true"},
        {"xla_tpu_enable_all_experimental_scheduler_features", "true"},
        {"xla_tpu_enable_scheduler_memory_pressure_tracking", "true"},
        {"xla_tpu_host_transfer_overlap_limit", "24"},
        {"xla_tpu_aggressive_opt_barrier_removal", "ENABLED"},
        {"xla_lhs_prioritize_async_depth_over_stall", "ENABLED"},
        {"xla_should_allow_loop_variant_parameter_in_chain", "ENABLED"},
        {"xla_should_add_loop_invariant_op_in_chain", "ENABLED"},
        {"xla_max_concurrent_host_send_recv", "100"},
        {"xla_tpu_scheduler_percent_shared_memory_limit", "100"},
        {"xla_latency_hiding_scheduler_rerun", "2"},
        {"xla_tpu_use_minor_sharding_for_major_trivial_input", "true"},
        {"xla_tpu_relayout_group_size_threshold_for_reduce_scatter", "1"},
        {"xla_tpu_assign_all_reduce_scatter_layout", "true"}}},
      {"wan_light",
       {{"xla_tpu_enable_async_collective_fusion", kRefused},
        {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "true"},
        {"xla_tpu_enable_async_collective_fusion_multiple_steps", "true"},
        {"xla_tpu_overlap_compute_collective_tc", "true"},
        {"xla_enable_async_all_reduce", "true"}}},
      {"multihost",
       {{"xla_tpu_enable_async_collective_fusion", "true"},
        {"xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "true"},
        {"xla_tpu_enable_async_collective_fusion_multiple_steps", "true"}}},
      {"ulysses", {{"xla_tpu_enable_async_all_to_all", "true"}, {"xla_tpu_overlap_compute_collective_tc", "true"}}}};
}

}  // namespace

const PlatformDef kTpuPlatform = {
    .hardware = "tpu",
    .plugin_files = {"libtpu/libtpu.so"},
    .wheel = "libtpu",
    .client_options = nullptr,
    // Loops copy one row ahead (ops/control_flow.cc). The compiler's own pipelining would carry the copied rows once
    // more, into memory in which their copy can begin only after their last use.
    .host_flags = {{"xla_tpu_pipeline_memory_host_transfers", "False"}},
    .flag_sets = flag_sets(),
    .environment = {"XLA_FLAGS", "LIBTPU_INIT_ARGS"},
    .peak_flops = peak,
    .rates = rates,
    .has_float8 = has_float8,
    .memory_is_the_hosts = false,
    .ffi_platform = nullptr,
    .absent = absent,
};

}  // namespace md::pjrt
