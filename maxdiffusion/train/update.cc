#include "maxdiffusion/train/update.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/per_device.h"

namespace md {
namespace {

/// The lists that an update changes, in the order of the kernels' operands.
std::vector<std::vector<Tensor>*> changing(UpdateGroup& group, const std::vector<size_t>& slots = {}) {
  std::vector<std::vector<Tensor>*> lists = {&group.params};
  for (size_t k = 0; k < group.slots.size(); ++k)
    if (slots.empty() || std::ranges::count(slots, k) > 0) lists.push_back(&group.slots[k]);
  if (!group.averages.empty()) lists.push_back(&group.averages);
  return lists;
}

/// The parameters that have a gradient.
std::vector<size_t> live(const ClippedGradients& grads, UpdateGroup& group) {
  std::vector<size_t> found;
  for (size_t i = 0; i < grads.unclipped.size(); ++i) {
    if (!grads.unclipped[i]) continue;
    for (const auto* list : changing(group)) {
      check(list->size() == grads.unclipped.size(), Code::internal, "update: {} arrays for {} gradients", list->size(),
            grads.unclipped.size());
    }
    check(group.params[i].shape() == grads.unclipped[i].shape(), Code::internal, "update: {} for a gradient {}",
          to_string(group.params[i].shape()), to_string(grads.unclipped[i].shape()));
    found.push_back(i);
  }
  return found;
}

void update_by_kernel(const FusedCall& fused, const ClippedGradients& grads, const std::vector<size_t>& live,
                      UpdateGroup& group) {
  const auto lists = changing(group, fused.slots);
  for (size_t from = 0; from < live.size(); from += kPerCall) {
    const size_t to = std::min(live.size(), from + kPerCall), n = to - from;
    std::vector<Tensor> operands = {fused.scalars};
    std::vector<DimAxes> axes = {{}};
    std::vector<Tensor*> outputs;
    std::string layers;
    if (fused.layers) {
      std::vector<int64_t> counts;
      for (size_t i = from; i < to; ++i)
        counts.push_back(group.stacked.empty() ? 1 : std::max<int64_t>(1, group.stacked[live[i]]));
      layers = fmt::format(", layers = array<i64: {}>", fmt::join(counts, ", "));
    }
    for (size_t i = from; i < to; ++i)
      operands.push_back(grads.unclipped[live[i]]), axes.push_back(group.axes[live[i]]);
    for (auto* list : lists)
      for (size_t i = from; i < to; ++i) {
        operands.push_back((*list)[live[i]]);
        axes.push_back(group.axes[live[i]]);
        outputs.push_back(&(*list)[live[i]]);
      }
    const std::vector<DimAxes> of_results(axes.begin() + 1 + static_cast<std::ptrdiff_t>(n), axes.end());
    const auto results = each_part(operands, axes, of_results, [&](const std::vector<Tensor>& part) {
      CustomCall call{.target = fused.kernel, .results = {}, .backend_config = fused.config + layers};
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
  std::vector<size_t> all = live(grads, group);
  if (all.empty()) return group;
  const auto state_of = [&](size_t i) {
    ParamState p{.value = group.params[i], .gradient = {}, .slots = {}};
    if (!group.stacked.empty()) p.stacked = group.stacked[i];
    for (const auto& slot : group.slots) p.slots.push_back(slot[i]);
    return p;
  };
  if (kernels_support_shards({grads.unclipped[all[0]]})) {
    const Tensor factor = grads.factor ? grads.factor : scalar_like(s.learning_rate, 1.0);
    for (const FusedCall& fused : optimizer.fused(s, grads.max_value, factor)) {
      if (fused.whole && !factor.graph().options().one_device()) continue;
      std::vector<size_t> taken;
      std::erase_if(all, [&](size_t i) {
        const bool takes = !fused.takes || fused.takes(state_of(i));
        if (takes) taken.push_back(i);
        return takes;
      });
      update_by_kernel(fused, grads, taken, group);
    }
    if (all.empty()) return group;
  }
  GroupState moved{.params = {}, .scalars = group.scalars};
  for (const size_t i : all) {
    moved.params.push_back(state_of(i));
    moved.params.back().gradient = grads.clipped(i);
  }
  moved = optimizer.update(s, std::move(moved));
  const auto change = [&](Tensor& value, Tensor after) {
    if (value) value = where(s.applied, after, value);
  };
  for (size_t k = 0; k < all.size(); ++k) {
    const size_t i = all[k];
    const ParamState& now = moved.params[k];
    if (!group.averages.empty()) change(group.averages[i], now.value + (group.averages[i] - now.value) * s.keep);
    change(group.params[i], now.value);
    for (size_t slot = 0; slot < group.slots.size(); ++slot) change(group.slots[slot][i], now.slots[slot]);
  }
  for (size_t k = 0; k < group.scalars.size(); ++k) change(group.scalars[k], moved.scalars[k]);
  return group;
}

}  // namespace md
