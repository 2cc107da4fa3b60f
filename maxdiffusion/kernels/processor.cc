#include "maxdiffusion/kernels/processor.h"

#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <ctime>

namespace md {
namespace {

const char* name_of(dnnl::cpu_isa isa) {
  using dnnl::cpu_isa;
  switch (isa) {
    case cpu_isa::sse41: return "sse41";
    case cpu_isa::avx: return "avx";
    case cpu_isa::avx2: return "avx2";
    case cpu_isa::avx2_vnni: return "avx2_vnni";
    case cpu_isa::avx512_core: return "avx512_core";
    case cpu_isa::avx512_core_vnni: return "avx512_core_vnni";
    case cpu_isa::avx512_core_bf16: return "avx512_core_bf16";
    case cpu_isa::avx512_core_amx: return "avx512_core_amx";
    default: return "other";
  }
}

#if defined(__x86_64__)

// Twelve independent sums. Both instructions update 16 sums; the bf16 one adds two products to each.
#define MD_TWELVE(i)                                                                                \
  i " %%zmm14, %%zmm15, %%zmm0\n" i " %%zmm14, %%zmm15, %%zmm1\n" i " %%zmm14, %%zmm15, %%zmm2\n" i \
    " %%zmm14, %%zmm15, %%zmm3\n" i " %%zmm14, %%zmm15, %%zmm4\n" i " %%zmm14, %%zmm15, %%zmm5\n" i \
    " %%zmm14, %%zmm15, %%zmm6\n" i " %%zmm14, %%zmm15, %%zmm7\n" i " %%zmm14, %%zmm15, %%zmm8\n" i \
    " %%zmm14, %%zmm15, %%zmm9\n" i " %%zmm14, %%zmm15, %%zmm10\n" i " %%zmm14, %%zmm15, %%zmm11\n"
#define MD_REGISTERS \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"

void clear_registers() { asm volatile("vzeroall" ::: MD_REGISTERS, "xmm12", "xmm13"); }
void products_of_bf16() {
  clear_registers();
  for (int i = 0; i < 1000; ++i) asm volatile(MD_TWELVE("vdpbf16ps")::: MD_REGISTERS);
  clear_registers();
}
void products_of_f32() {
  clear_registers();
  for (int i = 0; i < 1000; ++i) asm volatile(MD_TWELVE("vfmadd231ps")::: MD_REGISTERS);
  clear_registers();
}

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

/// Number of bf16 products per f32 product in the same time, in registers. Processors have 2 (a bf16 instruction takes
/// as long as an f32 one) or 0.5, so that noise from other programs does not change the decision.
double bf16_rate() {
  double bf16 = 1, f32 = 1;
  for (int i = 0; i < 40; ++i) {
    const double start = thread_seconds();
    products_of_bf16();
    const double middle = thread_seconds();
    products_of_f32();
    bf16 = std::min(bf16, middle - start);
    f32 = std::min(f32, thread_seconds() - middle);
  }
  return 2 * f32 / bf16;
}

#else
double bf16_rate() { return 0; }
#endif

Processor detect() {
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  constexpr double kWorthIt = 1.4;
  const std::string name = name_of(isa);
  return {name, name.starts_with("avx512"),
          isa == dnnl::cpu_isa::avx512_core_amx || (isa == dnnl::cpu_isa::avx512_core_bf16 && bf16_rate() > kWorthIt)};
}

}  // namespace

std::string Processor::describe() const { return isa + (bf16_products ? ", products in bf16" : ""); }

const Processor& processor() {
  static const Processor detected = detect();
  return detected;
}

}  // namespace md
