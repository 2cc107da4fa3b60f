// CPU: one device uses all cores. The plugin sizes its thread pool by the machine (override: PJRT_NPROC), so a client
// with one device uses every core; more devices share this pool and are for tests of sharding.
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {

const PlatformDef kCpuPlatform = {
    .hardware = "cpu",
    .plugin_files = {"fastatomstruct_xla_cpu/libpjrt_cpu.so", "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"},
#if defined(__x86_64__)
    .wheel = "fastatomstruct-xla-cpu",
#else  // the first plugin has no build for other architectures
    .wheel = "xla-cpu-pjrt",
#endif
    .client_options =
        [](const Options&) {
          return Options{{"cpu_device_count", int64_t{1}}};
        },  // some default to 4
    // Optimization barriers that are kept to the end are what makes rematerialization lower the peak: if they are
    // expanded early, the default of this compiler, the recomputation is merged with the forward pass (tests/autodiff,
    // deep chain). Fusions for YNNPACK build their pipelines during the first step, 2 s for a UNet, and do not make
    // steps faster.
    .compile_flags = {{"xla_disable_hlo_passes", "cse_barrier_expander"},
                      {"xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INVALID"}},
    // By default this compiler starts operations as early as possible and hoists invariant code out of loops: all bf16
    // weights, widened to f32, would be in memory at once (SDXL: 14.7 GiB of temporary memory; with these flags 2.8).
    .lean_flags = {{"xla_disable_hlo_passes", "cse_barrier_expander,while-loop-invariant-code-motion"},
                   {"xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}},
    .environment = {"XLA_FLAGS", "PJRT_NPROC"},
    .peak_flops = [](std::string_view, DType) { return std::optional<double>(); },
    .rates = [](std::string_view) { return std::optional<DeviceRates>(); },
    .has_float8 = [](const Device&) { return true; },  // computed in wider types
    .memory_is_the_hosts = true,
    .ffi_platform = "Host",
    // The first plugin requires a processor from 2013 or later, and crashes on others; the second runs on all.
    .lacking =
        []([[maybe_unused]] std::string_view file) {
#if defined(__x86_64__)
          static const bool modern = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
          if (!modern && file.ends_with("/libpjrt_cpu.so")) return std::string("AVX2");
#endif
          return std::string();
        },
};

}  // namespace md::pjrt
