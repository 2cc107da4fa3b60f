// TPUs. Peaks are bf16 per chip from the vendor's system architecture pages; v4 and newer show one device per chip.
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

}  // namespace

const PlatformDef kTpuPlatform = {
    .hardware = "tpu",
    .plugin_files = {"libtpu/libtpu.so"},
    .wheel = "libtpu",
    .default_options = {},
    .environment = {"XLA_FLAGS", "LIBTPU_INIT_ARGS"},
    .peak_flops = peak,
    .ffi_platform = nullptr,
};

}  // namespace md::pjrt
