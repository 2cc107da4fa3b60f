// Exponential moving averages of the parameters, as diffusers' EMAModel keeps them.

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/kernel_call.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {

std::vector<Tensor> moving_average(Tensor keep, Tensor applied, const std::vector<Tensor>& averages,
                                   const std::vector<Tensor>& params) {
  check(averages.size() == params.size(), Code::internal, "moving_average: {} averages of {} parameters",
        averages.size(), params.size());
  std::vector<Tensor> out;
  if (averages.empty()) return out;
  for (const auto* list : {&averages, &params})
    for (Tensor t : *list)
      check(t.dtype() == DType::f32, Code::internal, "moving_average: of {}; expected f32", to_string(t.shape()));
  if (!kernels_take(averages)) {
    for (size_t i = 0; i < params.size(); ++i)
      out.push_back(where(applied, params[i] + (averages[i] - params[i]) * keep, averages[i]));
    return out;
  }
  const Tensor rates = stack({keep, cast(applied, DType::f32)}, 0);
  for (size_t from = 0; from < params.size(); from += kPerCall) {
    const size_t to = std::min(params.size(), from + kPerCall);
    std::vector<Tensor> operands = {rates};
    CustomCall call{.target = kMovingAverageKernel, .results = {}, .backend_config = {}};
    for (size_t i = from; i < to; ++i) {
      call.in_place.emplace_back(static_cast<int>(call.results.size()), static_cast<int>(operands.size()));
      call.results.push_back(averages[i].shape());
      operands.push_back(averages[i]);
    }
    operands.insert(operands.end(), params.begin() + static_cast<std::ptrdiff_t>(from),
                    params.begin() + static_cast<std::ptrdiff_t>(to));
    const auto moved = custom_call(keep.graph(), operands, call);
    out.insert(out.end(), moved.begin(), moved.end());
  }
  return out;
}

}  // namespace md
