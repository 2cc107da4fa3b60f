// Exponential moving averages of the parameters, as diffusers' EMAModel keeps them.

#include <algorithm>
#include <span>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/gradient_norm.h"
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
  if (!kernels_take_parts(averages)) {
    for (size_t i = 0; i < params.size(); ++i)
      out.push_back(where(applied, params[i] + (averages[i] - params[i]) * keep, averages[i]));
    return out;
  }
  const Tensor rates = stack({keep, cast(applied, DType::f32)}, 0);
  const std::vector<DimAxes> all_axes = axes_of_inputs(averages);
  for (size_t from = 0; from < params.size(); from += kPerCall) {
    const size_t to = std::min(params.size(), from + kPerCall), n = to - from;
    const auto some = [&](const auto& list) { return std::span(list).subspan(from, n); };
    std::vector<Tensor> operands = {rates};
    std::vector<DimAxes> axes = {{}};
    for (const auto* list : {&averages, &params}) {
      operands.insert(operands.end(), some(*list).begin(), some(*list).end());
      axes.insert(axes.end(), some(all_axes).begin(), some(all_axes).end());
    }
    const std::vector<DimAxes> of_results(some(all_axes).begin(), some(all_axes).end());
    const auto moved = each_part(operands, axes, of_results, [&](const std::vector<Tensor>& part) {
      CustomCall call{.target = kMovingAverageKernel, .results = {}, .backend_config = {}};
      for (size_t i = 1; i <= n; ++i) {
        call.in_place.emplace_back(static_cast<int>(i) - 1, static_cast<int>(i));
        call.results.push_back(part[i].shape());
      }
      return custom_call(part[0].graph(), part, call);
    });
    out.insert(out.end(), moved.begin(), moved.end());
  }
  return out;
}

}  // namespace md
