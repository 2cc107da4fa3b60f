// Sums over the processes of a job, in place. The call returns when all processes have made it.
#include <exception>
#include <span>
#include <vector>

#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/kernels/arrays.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

ffi::Error process_sum_kernel(int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets, double scale) {
  Span span("sum over processes");
  if (args.size() != rets.size())
    return ffi::Error::InvalidArgument("md_process_sum: there are not as many results as operands");
  auto arrays = arrays_of(args, 0, args.size());
  if (arrays.has_error()) return arrays.error();
  if (auto error = move_to_results(*arrays, rets, 0); error.failure()) return error;
  std::vector<std::span<float>> values;
  for (size_t i = 0; i < arrays->data.size(); ++i)
    values.emplace_back(static_cast<float*>(arrays->data[i]), static_cast<size_t>(arrays->sizes[i]));
  try {
    processes().sum(device, values, static_cast<float>(scale));
  } catch (const std::exception& e) {
    return ffi::Error::Internal(e.what());
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kProcessSum, process_sum_kernel,
    ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().RemainingArgs().RemainingRets().Attr<double>("scale"));

}  // namespace

void* process_sum_handler() { return reinterpret_cast<void*>(kProcessSum); }

}  // namespace md
