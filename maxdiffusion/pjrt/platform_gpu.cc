// NVIDIA GPUs. Peaks are the dense tensor-core figures of the vendor's data sheets (SXM if there are several); target
// configs of unattached GPUs are from openxla/xla, xla/backends/gpu/target_config/specs.
#include <fmt/format.h>

#include <cctype>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/gpu_memory.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

/// Properties for compiling without the card; sizes of both kinds of shared memory in bytes.
struct Chip {
  const char* key;          // in the config; null: cannot be compiled for without a card
  const char* description;  // the name that the card reports
  int capability;           // major number of its compute capability
  int cores, lanes;         // streaming multiprocessors, and the f32 units of each
  double clock;             // GHz
  int64_t memory, cache;    // bytes of device memory and of L2 cache
  int64_t shared_memory, shared_memory_of_block;
};

struct Card {
  const char* kind;
  double half, tf32;  // bf16 and f16; f32 inputs
  DeviceRates rates;  // memory; NVLink in one direction, or PCIe; one network card each; the host's memory
  Chip chip;
};
constexpr double kPcie4 = 31.5e9, kPcie5 = 63e9;  // bytes/s of 16 lanes in one direction
constexpr Card kCards[] = {
    {"B200",
     2250e12,
     1125e12,
     {8000e9, 900e9, 50e9, 0, kPcie5},
     {"b200", "NVIDIA B200", 10, 148, 128, 1.965, 191514411008, 132644864, 233472, 232448}},
    {"H200",
     989e12,
     494e12,
     {4800e9, 450e9, 50e9, 0, kPcie5},
     {"h200", "NVIDIA H200 141GB HBM3e", 9, 132, 128, 1.98, 151397597184, 52428800, 233472, 232448}},
    {"H100",
     989e12,
     494e12,
     {3350e9, 450e9, 50e9, 0, kPcie5},
     {"h100", "NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 84942979072, 52428800, 233472, 232448}},
    {"A100",
     312e12,
     156e12,
     {2039e9, 300e9, 25e9, 0, kPcie4},
     {"a100", "NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 85100068864, 41943040, 167936, 166912}},
    {"L40S", 362e12, 183e12, {864e9, 32e9, 25e9, 0, kPcie4}, {}},
    {"L4", 121e12, 60e12, {300e9, 32e9, 12.5e9, 0, kPcie4}, {}},
};

const Card* card(std::string_view kind) {
  for (const Card& c : kCards)
    if (kind.find(c.kind) != kind.npos) return &c;
  return nullptr;
}

/// The text of a GpuTargetConfigProto. Limits are common to all GPUs; versions are those of the toolkit
/// (cmake/wheels_gpu.txt) and the oldest supported cuDNN (ops/attention_cudnn.cc).
std::string description(const Card& card) {
  const Chip& c = card.chip;
  return fmt::format(
      "gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 "
      "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
      "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 "
      "registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152 "
      "shared_memory_per_core: {} shared_memory_per_block_optin: {} core_count: {} fpus_per_core: {} "
      "clock_rate_ghz: {} memory_bandwidth: {:.0f} l2_cache_size: {} device_memory_size: {} "
      "cuda_compute_capability {{ major: {} feature_extension: {} }} }} "
      "platform_name: \"CUDA\" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }} "
      "device_description_str: \"{}\"",
      c.shared_memory, c.shared_memory_of_block, c.cores, c.lanes, c.clock, card.rates.memory, c.cache, c.memory,
      c.capability, c.capability >= 9 ? "ACCELERATED_FEATURES" : "NONE", c.description);
}

std::string target(std::string_view device) {
  std::vector<std::string> known;
  for (const Card& c : kCards) {
    if (!c.chip.key) continue;
    if (device == c.chip.key) return description(c);
    known.emplace_back(c.chip.key);
  }
  fail(Code::invalid_config, "gpu_type is '{}'; expected one of: {}", device,
       nearest_first(std::string(device), known));
}

std::optional<double> peak(std::string_view kind, DType type) {
  const Card* c = card(kind);
  if (!c) return {};
  if (type == DType::bf16 || type == DType::f16) return c->half;
  if (type == DType::f32) return c->tf32;
  return {};
}

std::optional<DeviceRates> rates(std::string_view kind) {
  const Card* c = card(kind);
  if (!c) return {};
  return c->rates;
}

Options client_options(const Options& options) {
  const auto visible = options.find("visible_devices");
  return gpu_memory_options(
      gpu_memory(visible == options.end() ? std::vector<int64_t>{} : std::get<std::vector<int64_t>>(visible->second)));
}

/// Supported from Ada and Hopper on.
bool has_float8(const Device& device) { return device.compute_capability >= 8.9; }

/// Device files of the driver: cards, Jetson's GPUs, Windows' GPUs under WSL.
std::string absent(const std::string& root) {
  std::error_code ec;
  for (const auto& f : std::filesystem::directory_iterator(root + "/dev", ec)) {
    const std::string name = f.path().filename();
    const bool card = name.starts_with("nvidia") && name.size() > 6 && std::isdigit(name[6]) != 0;
    if (card || name.starts_with("nvhost-gpu") || name.starts_with("nvgpu") || name == "dxg") return "";
  }
  return "this machine has no NVIDIA GPU, or its driver is not loaded: there is no /dev/nvidia0";
}

}  // namespace

const PlatformDef kGpuPlatform = {
    .hardware = "gpu",
    .plugin_files = {"jax_plugins/xla_cuda13/xla_cuda_plugin.so", "xla_plugins/xla_cuda13/xla_cuda_plugin.so",
                     "xla_plugins/xla_cuda13_pjrt/xla_cuda13_pjrt.so"},
    .wheel = "jax-cuda13-pjrt",
    .client_options = client_options,
    // Collectives overlap with computation. Triton's tiles are tuned on the card, which may not be attached; untuned
    // ones are tiny, and cuBLAS is faster. A resumed run equals one without a break to the bit: some of cuDNN's
    // algorithms for gradients of convolutions sum in an order that differs from run to run. Not so with cuDNN's
    // attention: without such algorithms its gradient stores all logits (23.5 GiB for 32,760 tokens of 12 heads), and
    // of SDXL and FLUX.1 it fails while it runs (plugin of JAX 0.11.2, cuDNN 9, on an H200).
    .compile_flags = {{"xla_gpu_enable_latency_hiding_scheduler", "True"},
                      {"xla_gpu_enable_triton_gemm", "False"},
                      {"xla_gpu_exclude_nondeterministic_ops", "True"}},
    .call_flags = {{"__cudnn$fmhaSoftmaxBackward", "xla_gpu_exclude_nondeterministic_ops", "False",
                    "a resumed run may differ in its last bits; attention=tokamax_flash is slower and exact"}},
    .environment = {"XLA_FLAGS"},
    .peak_flops = peak,
    .rates = rates,
    .has_float8 = has_float8,
    .memory_is_the_hosts = false,
    .ffi_platform = "CUDA",
    .target = target,
    .absent = absent,
};

}  // namespace md::pjrt
