#include "maxdiffusion/optim/optimizer.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"

namespace md {

std::optional<StateArray> StateSlot::array(const ParamForm& p) const {
  return form ? form(p) : StateArray{{DType::f32, p.dims}, p.axes};
}

Axes ParamState::own_axes() const {
  Axes axes;
  for (int64_t i = first(); i < value.rank(); ++i) axes.push_back(i);
  return axes;
}

UpdateRule Optimizer::rule(const StepScalars&) const { fail(Code::internal, "{} has no rule", full_name()); }

GroupState Optimizer::update(const StepScalars& s, GroupState group) const {
  const UpdateRule moved = rule(s);
  for (ParamState& p : group.params) {
    std::vector<Tensor> after = moved(p);
    check(after.size() == 1 + p.slots.size(), Code::internal, "an optimizer of {} slots returns {} arrays",
          p.slots.size(), after.size());
    p.value = after[0];
    p.slots.assign(after.begin() + 1, after.end());
  }
  return group;
}

namespace {

bool is_moment(const StateSlot& slot) { return !slot.form && slot.start == StateSlot::Start::zeros; }

}  // namespace

std::vector<StateSlot> optimizer_slots(const OptimConfig& config) {
  std::vector<StateSlot> slots = make_optimizer(config)->slots();
  if (config.moments_dtype == "bfloat16")
    for (StateSlot& slot : slots)
      if (is_moment(slot)) slot.form = [](const ParamForm& p) { return StateArray{{DType::bf16, p.dims}, p.axes}; };
  return slots;
}

bool has_moments_of_parameters(const Optimizer& optimizer) {
  const std::vector<StateSlot> slots = optimizer.slots();
  return std::ranges::any_of(slots, is_moment);
}

std::vector<std::string> state_prefixes(const Optimizer& optimizer) {
  std::vector<std::string> prefixes;
  for (const StateSlot& slot : optimizer.slots()) prefixes.emplace_back(slot.prefix);
  for (const StateScalar& scalar : optimizer.scalars()) prefixes.emplace_back(scalar.prefix);
  return prefixes;
}

}  // namespace md
