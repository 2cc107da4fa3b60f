// NVIDIA GPUs. Peaks are the dense tensor-core figures of the vendor's data sheets (SXM where there are several).
#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

struct Card {
  const char* kind;
  double half, tf32;  // bf16 and f16; f32 inputs
  DeviceRates rates;  // memory; NVLink in one direction, or PCIe; one network card each
};
constexpr Card kCards[] = {
    {"B200", 2250e12, 1125e12, {8000e9, 900e9, 50e9}}, {"H200", 989e12, 494e12, {4800e9, 450e9, 50e9}},
    {"H100", 989e12, 494e12, {3350e9, 450e9, 50e9}},   {"A100", 312e12, 156e12, {2039e9, 300e9, 25e9}},
    {"L40S", 362e12, 183e12, {864e9, 32e9, 25e9}},     {"L4", 121e12, 60e12, {300e9, 32e9, 12.5e9}},
};

const Card* card(std::string_view kind) {
  for (const Card& c : kCards)
    if (kind.find(c.kind) != kind.npos) return &c;
  return nullptr;
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
    .rates = rates,
    .has_float8 = has_float8,
    .ffi_platform = "CUDA",
};

}  // namespace md::pjrt
