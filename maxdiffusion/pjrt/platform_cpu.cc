// CPU: one device is all cores. The plugin sizes its thread pool by the machine (override: PJRT_NPROC), so a client of
// one device uses every core; more devices share the same pool and exist for tests of sharding.
#include "maxdiffusion/pjrt/platforms.h"

namespace md::pjrt {

const PlatformDef kCpuPlatform = {
    .hardware = "cpu",
    .plugin_files = {"fastatomstruct_xla_cpu/libpjrt_cpu.so", "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so"},
#if defined(__x86_64__)
    .wheel = "fastatomstruct-xla-cpu",
#else  // which the first is not built for
    .wheel = "xla-cpu-pjrt",
#endif
    .default_options = {{"cpu_device_count", int64_t{1}}},  // some builds default to 4
    // Kept to the end, optimization barriers are what makes rematerialisation lower the peak: expanded early, as this
    // compiler does by default, the recomputation is merged with the forward pass again (tests/autodiff, deep chain).
    // Fusions for YNNPACK build their pipelines during the first step: 2 s of a UNet's, and no step is faster for it.
    .compile_flags = {{"xla_disable_hlo_passes", "cse_barrier_expander"},
                      {"xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INVALID"}},
    // By default this compiler starts operations as early as it can and moves what does not change out of loops: bf16
    // weights, which it widens to f32, would all be held twice over (SDXL: 14.7 GiB of temporary memory, so 2.8).
    .lean_flags = {{"xla_disable_hlo_passes", "cse_barrier_expander,while-loop-invariant-code-motion"},
                   {"xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}},
    .environment = {"XLA_FLAGS", "PJRT_NPROC"},
    .peak_flops = [](std::string_view, DType) { return std::optional<double>(); },
    .rates = [](std::string_view) { return std::optional<DeviceRates>(); },
    .has_float8 = [](const Device&) { return true; },  // the compiler computes in wider types
    .memory_is_the_hosts = true,
    .ffi_platform = "Host",
    // The first plugin is compiled for processors since 2013 and ends by a signal on others; the second for all.
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
