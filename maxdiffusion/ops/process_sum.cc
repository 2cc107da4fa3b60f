#include "maxdiffusion/ops/process_sum.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/per_device.h"

namespace md {

std::vector<Tensor> process_sum(const std::vector<Tensor>& xs, const std::vector<DimAxes>& axes, double scale) {
  const Graph& g = innermost(xs);
  check(g.options().cpu_kernels.callable, Code::invalid_config,
        "several processes without a common client: their sums are calls that only the CPU plugin supports");
  return each_part(xs, axes, axes, [&](const std::vector<Tensor>& parts) {
    CustomCall call{.target = kProcessSumKernel,
                    .results = {},
                    .backend_config = fmt::format("scale = {:.17e} : f64", scale),
                    .has_side_effect = true};
    for (size_t i = 0; i < parts.size(); ++i) {
      check(parts[i].dtype() == DType::f32, Code::invalid_graph, "process_sum: operand {} is {}; expected f32", i,
            to_string(parts[i].shape()));
      call.results.push_back(parts[i].shape());
      call.in_place.emplace_back(static_cast<int>(i), static_cast<int>(i));
    }
    return custom_call(innermost(parts), parts, call);
  });
}

}  // namespace md
