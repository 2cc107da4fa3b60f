#include "maxdiffusion/tasks/task.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"

namespace md {

Tensor Task::batch_rows(Tensor replica, int64_t) const {
  const std::vector<BatchField> fields = batch();
  const auto batched = std::ranges::find_if(fields, [](const BatchField& f) { return f.batched; });
  check(batched != fields.end(), Code::invalid_graph, "{}: no field of the batch has rows", model());
  const Tensor rows = iota(replica.graph(), {DType::s32, {batched->shape.dims[0]}}, 0);
  return rows + replica * static_cast<double>(rows.dims()[0]);
}

}  // namespace md
