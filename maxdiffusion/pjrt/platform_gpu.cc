// NVIDIA GPUs. Peaks are the dense tensor-core figures of the vendor's data sheets (SXM where there are several).
#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

struct Peak {
  const char* kind;
  double half, tf32;  // bf16 and f16; f32 inputs
};
constexpr Peak kPeaks[] = {
    {"B200", 2250e12, 1125e12}, {"H200", 989e12, 494e12}, {"H100", 989e12, 494e12},
    {"A100", 312e12, 156e12},   {"L40S", 362e12, 183e12}, {"L4", 121e12, 60e12},
};

std::optional<double> peak(std::string_view kind, DType type) {
  for (const Peak& p : kPeaks)
    if (kind.find(p.kind) != kind.npos) {
      if (type == DType::bf16 || type == DType::f16) return p.half;
      if (type == DType::f32) return p.tf32;
      return {};
    }
  return {};
}

/// From Ada and Hopper on.
bool has_float8(const Device& device) { return device.compute_capability >= 8.9; }

}  // namespace

const PlatformDef kGpuPlatform = {
    .hardware = "gpu",
    .plugin_files = {"jax_plugins/xla_cuda13/xla_cuda_plugin.so", "xla_plugins/xla_cuda13/xla_cuda_plugin.so",
                     "xla_plugins/xla_cuda13_pjrt/xla_cuda13_pjrt.so"},
    .wheel = "jax-cuda13-pjrt",
    .default_options = {},
    .environment = {"XLA_FLAGS"},
    .peak_flops = peak,
    .has_float8 = has_float8,
    .ffi_platform = "CUDA",
};

}  // namespace md::pjrt
