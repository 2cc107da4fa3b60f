// TPUs. Peaks are bf16 per chip from the vendor's system architecture pages; v4 and newer show one device per chip.
#include <algorithm>

#include "maxdiffusion/pjrt/client.h"
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {
namespace {

struct Peak {
  const char* kind;
  double bf16;
};
// Longer names first: "TPU v5" is what v5p calls itself.
constexpr Peak kPeaks[] = {
    {"TPU v6 lite", 918e12}, {"TPU v6e", 918e12}, {"TPU v5 lite", 197e12}, {"TPU v5e", 197e12},
    {"TPU v5p", 459e12},     {"TPU v5", 459e12},  {"TPU v4", 275e12},
};

std::optional<double> peak(std::string_view kind, DType type) {
  if (type != DType::bf16) return {};
  for (const Peak& p : kPeaks)
    if (kind.starts_with(p.kind)) return p.bf16;
  return {};
}

/// From the seventh generation on.
bool has_float8(const Device& device) {
  constexpr std::string_view kBefore[] = {"TPU v2", "TPU v3", "TPU v4", "TPU v5", "TPU v6"};
  return std::ranges::none_of(kBefore, [&](std::string_view kind) { return device.kind.starts_with(kind); });
}

}  // namespace

const PlatformDef kTpuPlatform = {
    .hardware = "tpu",
    .plugin_files = {"libtpu/libtpu.so"},
    .wheel = "libtpu",
    .default_options = {},
    .environment = {"XLA_FLAGS", "LIBTPU_INIT_ARGS"},
    .peak_flops = peak,
    .has_float8 = has_float8,
    .ffi_platform = nullptr,
};

}  // namespace md::pjrt
