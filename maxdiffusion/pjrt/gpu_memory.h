// Memory of NVIDIA GPUs: how much of it a client takes.
#pragma once

#include <cstdint>
#include <vector>

#include "maxdiffusion/pjrt/plugin.h"

namespace md::pjrt {

/// Bytes of one GPU.
struct GpuMemory {
  int64_t free, total;
};

/// The GPUs that CUDA shows to this process, or those of them with these numbers; from CUDA's driver, which keeps its
/// contexts. Empty: there is no driver, or it refuses.
std::vector<GpuMemory> gpu_memory(const std::vector<int64_t>& only = {});

/// Options of the GPU plugin's client: it allocates, when it is opened, what is free on every GPU but a reserve for
/// libraries and programs (7 %; of a single GPU 2 GiB at most), where XLA's default is 75 % of all. JAX's variables
/// XLA_PYTHON_CLIENT_MEM_FRACTION (of all, above 0, at most 1), XLA_PYTHON_CLIENT_PREALLOCATE (true, false) and
/// XLA_PYTHON_CLIENT_ALLOCATOR (default, platform, bfc, cuda_async) take precedence; throws invalid_config for other
/// values. Throws out_of_memory if less than 256 MiB are left to allocate.
Options gpu_memory_options(const std::vector<GpuMemory>& gpus);

}  // namespace md::pjrt
