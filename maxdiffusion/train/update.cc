#include "maxdiffusion/train/update.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"

namespace md {
namespace {

/// The lists that an update changes, as kernels take them.
std::vector<std::vector<Tensor>*> changing(UpdateGroup& group) {
  std::vector<std::vector<Tensor>*> lists = {&group.params};
  for (std::vector<Tensor>& slot : group.slots) lists.push_back(&slot);
  if (!group.averages.empty()) lists.push_back(&group.averages);
  return lists;
}

/// The parameters that have a gradient.
std::vector<size_t> live(const ClippedGradients& grads, UpdateGroup& group) {
  std::vector<size_t> found;
  for (size_t i = 0; i < grads.given.size(); ++i) {
    if (!grads.given[i]) continue;
    for (const auto* list : changing(group)) {
      check(list->size() == grads.given.size(), Code::internal, "update: {} arrays for {} gradients", list->size(),
            grads.given.size());
      check((*list)[i].shape() == grads.given[i].shape(), Code::internal, "update: {} for a gradient {}",
            to_string((*list)[i].shape()), to_string(grads.given[i].shape()));
    }
    found.push_back(i);
  }
  return found;
}

void update_by_kernel(const FusedCall& fused, const ClippedGradients& grads, const std::vector<size_t>& live,
                      UpdateGroup& group) {
  const auto lists = changing(group);
  for (size_t from = 0; from < live.size(); from += kPerCall) {
    const size_t to = std::min(live.size(), from + kPerCall), n = to - from;
    std::vector<Tensor> operands = {fused.scalars};
    std::vector<DimAxes> axes = {{}};
    std::vector<Tensor*> outputs;
    for (size_t i = from; i < to; ++i) operands.push_back(grads.given[live[i]]), axes.push_back(group.axes[live[i]]);
    for (auto* list : lists)
      for (size_t i = from; i < to; ++i) {
        operands.push_back((*list)[live[i]]);
        axes.push_back(group.axes[live[i]]);
        outputs.push_back(&(*list)[live[i]]);
      }
    const std::vector<DimAxes> of_results(axes.begin() + 1 + static_cast<std::ptrdiff_t>(n), axes.end());
    const auto results = each_part(operands, axes, of_results, [&](const std::vector<Tensor>& part) {
      CustomCall call{.target = fused.kernel, .results = {}, .backend_config = fused.config};
      for (size_t i = 1 + n; i < part.size(); ++i) {
        call.in_place.emplace_back(static_cast<int>(call.results.size()), static_cast<int>(i));
        call.results.push_back(part[i].shape());
      }
      return custom_call(part[0].graph(), part, call);
    });
    for (size_t i = 0; i < outputs.size(); ++i) *outputs[i] = results[i];
  }
}

}  // namespace

UpdateGroup apply_update(const Optimizer& optimizer, const StepScalars& s, const ClippedGradients& grads,
                         UpdateGroup group) {
  const std::vector<size_t> all = live(grads, group);
  if (all.empty()) return group;
  if (kernels_support_shards({grads.given[all[0]]})) {
    const Tensor factor = grads.factor ? grads.factor : scalar_like(s.learning_rate, 1.0);
    if (const auto fused = optimizer.fused(s, grads.max_value, factor)) {
      update_by_kernel(*fused, grads, all, group);
      return group;
    }
  }
  const UpdateRule rule = optimizer.rule(s);
  for (const size_t i : all) {
    std::vector<Tensor> slots;
    for (const auto& slot : group.slots) slots.push_back(slot[i]);
    const std::vector<Tensor> moved = rule(group.params[i], grads.clipped(i), slots);
    check(moved.size() == 1 + slots.size(), Code::internal, "an optimizer of {} slots returns {} arrays", slots.size(),
          moved.size());
    const auto change = [&](Tensor& value, Tensor after) { value = where(s.applied, after, value); };
    if (!group.averages.empty()) change(group.averages[i], moved[0] + (group.averages[i] - moved[0]) * s.keep);
    change(group.params[i], moved[0]);
    for (size_t k = 0; k < slots.size(); ++k) change(group.slots[k][i], moved[k + 1]);
  }
  return group;
}

}  // namespace md
