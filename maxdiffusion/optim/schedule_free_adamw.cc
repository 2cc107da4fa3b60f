// Schedule-free AdamW: gradients are evaluated between a sequence that takes the steps and its average. The average is
// the parameter, which is saved and sampled. As in schedulefree. Source: Defazio et al. 2024, "The Road Less
// Scheduled".

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/optim/moments.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct ScheduleFreeArgs {
  std::vector<double> betas = {0.9, 0.999};
  double eps = 1e-8, weight_decay = 0, warmup_steps = 0, r = 0, weight_lr_power = 2;
  template <class V>
  void visit(V&& v) {
    v("betas", betas, "how near the average gradients are computed; decay of the second moment", in_range(0, below(1)));
    v("eps", eps, "added outside the root", at_least(0));
    v("weight_decay", weight_decay, "decoupled weight decay", at_least(0));
    v("warmup_steps", warmup_steps, "updates of warming up, after the warm-up of lr_scheduler", at_least(0));
    v("r", r, "exponent of an update's number in its weight in the average", at_least(0));
    v("weight_lr_power", weight_lr_power, "exponent of the largest learning rate in that weight", at_least(0));
  }
};

class ScheduleFreeAdamw final : public Optimizer {
 public:
  explicit ScheduleFreeAdamw(ScheduleFreeArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override {
    return {{"schedule_free_z/", StateSlot::Start::copy}, {"schedule_free_v/"}};
  }
  std::vector<StateScalar> scalars() const override {
    return {{"schedule_free_weights/", 0}, {"schedule_free_largest_rate/", 0}};
  }

  bool looks_ahead() const override { return true; }
  Tensor point(Tensor average, const std::vector<Tensor>& slots) const override {
    return average * a_.betas[0] + slots[0] * (1 - a_.betas[0]);
  }

  GroupState update(const StepScalars& s, GroupState group) const override {
    const Tensor n = s.updates + 1.0, one = scalar_like(n, 1);
    const Tensor rate = a_.warmup_steps > 0 ? s.learning_rate * minimum(n / a_.warmup_steps, one) : s.learning_rate;
    const Tensor largest = maximum(group.scalars[1], rate);
    Tensor weight = pow(largest, scalar_like(largest, a_.weight_lr_power));
    if (a_.r != 0) weight = weight * pow(n, scalar_like(n, a_.r));
    const Tensor weights = group.scalars[0] + weight;
    const Tensor part = weight / where(gt(weights, scalar_like(n, 0)), weights, one);
    const Tensor correction = bias_correction(a_.betas[1], s.updates);
    for (ParamState& p : group.params) {
      const Tensor g = p.gradient, v = p.slots[1] * a_.betas[1] + square(g) * (1 - a_.betas[1]);
      Tensor direction = g / (sqrt(v / correction) + a_.eps);
      if (a_.weight_decay != 0) direction = direction + point(p.value, p.slots) * a_.weight_decay;
      const Tensor z = p.slots[0] - direction * rate;
      p.value = p.value + (z - p.value) * part;
      p.slots = {z, v};
    }
    group.scalars = {weights, largest};
    return group;
  }

  std::string full_name() const override {
    return called("schedulefree.adamw_schedulefree.AdamWScheduleFree", as_arguments(a_));
  }

 private:
  ScheduleFreeArgs a_;
};

}  // namespace

OptimizerEntry schedule_free_adamw() {
  return optimizer_with_arguments<ScheduleFreeAdamw, ScheduleFreeArgs>("schedule_free_adamw");
}

}  // namespace md
