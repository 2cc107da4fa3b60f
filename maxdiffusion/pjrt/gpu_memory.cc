#include "maxdiffusion/pjrt/gpu_memory.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>

#include "maxdiffusion/base/error.h"

namespace md::pjrt {
namespace {

constexpr double kGiB = 1 << 30;

/// A variable of the environment; null: unset or empty.
const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

template <size_t N>
void check_one_of(const char* name, const std::string& value, const std::array<const char*, N>& known) {
  check(std::ranges::find(known, value) != known.end(), Code::invalid_config,
        "environment: {} is '{}'; expected one of: {}", name, value, fmt::join(known, ", "));
}

/// The part of a GPU's memory that a client takes.
float free_part(const std::vector<GpuMemory>& gpus) {
  double least = 1;
  for (size_t i = 0; i < gpus.size(); ++i) {
    const auto free = static_cast<double>(gpus[i].free), total = static_cast<double>(gpus[i].total);
    const double reserve = gpus.size() > 1 ? 0.07 * total : std::min(0.07 * total, 2 * kGiB);
    if (free - reserve < kGiB / 4)
      throw Error(Code::out_of_memory,
                  fmt::format("hardware: gpu: {:.2f} GiB of GPU {}'s {:.2f} are free; other processes hold the rest",
                              free / kGiB, i, total / kGiB))
          .note(
              "try: nvidia-smi, which lists them; a process that is to share a GPU is started with "
              "XLA_PYTHON_CLIENT_MEM_FRACTION=0.4 or XLA_PYTHON_CLIENT_PREALLOCATE=false");
    least = std::min(least, (free - reserve) / total);
  }
  return static_cast<float>(least);
}

}  // namespace

std::vector<GpuMemory> gpu_memory(const std::vector<int64_t>& only) {
  void* cuda = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!cuda) return {};
  const auto call = [&]<class... Args>(const char* name, Args... args) {
    auto* function = reinterpret_cast<int (*)(Args...)>(::dlsym(cuda, name));
    return function != nullptr && function(args...) == 0;  // CUDA_SUCCESS
  };
  int count = 0;
  if (!call("cuInit", 0U) || !call("cuDeviceGetCount", &count)) return {};
  std::vector<GpuMemory> out;
  for (int i = 0; i < count; ++i) {
    if (!only.empty() && std::ranges::find(only, i) == only.end()) continue;
    int device = 0;
    void* context = nullptr;
    size_t free = 0, total = 0;
    // The context is the one that the plugin uses, so it is not released.
    if (!call("cuDeviceGet", &device, i) || !call("cuDevicePrimaryCtxRetain", &context, device) ||
        !call("cuCtxPushCurrent_v2", context))
      return {};
    const bool well = call("cuMemGetInfo_v2", &free, &total);
    call("cuCtxPopCurrent_v2", &context);
    if (!well || total == 0) return {};
    out.push_back({static_cast<int64_t>(free), static_cast<int64_t>(total)});
  }
  return out;
}

Options gpu_memory_options(const std::vector<GpuMemory>& gpus) {
  Options options;
  if (const char* fraction = variable("XLA_PYTHON_CLIENT_MEM_FRACTION")) {
    char* end = nullptr;
    const float value = std::strtof(fraction, &end);
    check(*end == 0 && value > 0 && value <= 1, Code::invalid_config,
          "environment: XLA_PYTHON_CLIENT_MEM_FRACTION is '{}'; expected a number above 0, at most 1, as 0.4",
          fraction);
    options["memory_fraction"] = value;
  } else if (!gpus.empty()) {
    options["memory_fraction"] = free_part(gpus);
  }
  if (const char* preallocate = variable("XLA_PYTHON_CLIENT_PREALLOCATE")) {
    check_one_of("XLA_PYTHON_CLIENT_PREALLOCATE", preallocate, std::array{"true", "false", "1", "0"});
    options["preallocate"] = *preallocate == 't' || *preallocate == '1';
  }
  if (const char* allocator = variable("XLA_PYTHON_CLIENT_ALLOCATOR")) {
    check_one_of("XLA_PYTHON_CLIENT_ALLOCATOR", allocator, std::array{"default", "platform", "bfc", "cuda_async"});
    options["allocator"] = std::string(allocator);
  }
  return options;
}

}  // namespace md::pjrt
