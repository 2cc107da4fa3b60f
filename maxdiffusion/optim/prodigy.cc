// Prodigy: AdamW that estimates its step size from the distance of the weights to their initial values. As in
// prodigyopt 1.1. Source: Mishchenko and Defazio 2023, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner".

#include <cmath>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/optim/moments.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct ProdigyArgs {
  std::vector<double> betas = {0.9, 0.999};
  std::optional<double> beta3;
  double eps = 1e-8, weight_decay = 0, d0 = 1e-6, d_coef = 1, growth_rate = HUGE_VAL;
  bool decouple = true, use_bias_correction = false, safeguard_warmup = false;
  template <class V>
  void visit(V&& v) {
    v("betas", betas, "decays of the moments", in_range(0, below(1)));
    v("beta3", beta3, "decay of the sums that d is estimated from; None: the root of the second of betas",
      in_range(0, 1));
    v("eps", eps, "added outside the root, times d", at_least(above(0)));
    v("weight_decay", weight_decay, "weight decay", at_least(0));
    v("decouple", decouple, "decay weights as AdamW does; False: add the decay to gradients");
    v("use_bias_correction", use_bias_correction, "Adam's correction of the moments");
    v("safeguard_warmup", safeguard_warmup, "the learning rate is left out of what d is divided by");
    v("d0", d0, "d before the first update", at_least(above(0)));
    v("d_coef", d_coef, "factor of the estimate of d", at_least(above(0)));
    v("growth_rate", growth_rate, "how much d may grow in an update", at_least(1));
  }
};

class Prodigy final : public Optimizer {
 public:
  explicit Prodigy(ProdigyArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override {
    return {{"prodigy_m/"}, {"prodigy_v/"}, {"prodigy_s/"}, {"prodigy_start/", StateSlot::Start::copy}};
  }
  std::vector<StateScalar> scalars() const override {
    return {{"prodigy_d/", a_.d0, "prodigy_d"}, {"prodigy_d_max/", a_.d0}, {"prodigy_numerator/", 0}};
  }

  GroupState update(const StepScalars& s, GroupState group) const override {
    const double b1 = a_.betas[0], b2 = a_.betas[1], b3 = a_.beta3.value_or(std::sqrt(b2));
    const Tensor d = group.scalars[0], zero = scalar_like(d, 0), rate = s.learning_rate;
    Tensor d_rate = d * rate;
    if (a_.use_bias_correction)
      d_rate = d_rate * (sqrt(bias_correction(b2, s.updates)) / bias_correction(b1, s.updates));
    const Tensor relative = d / a_.d0, of_sum = relative * (a_.safeguard_warmup ? d : d_rate);
    const Tensor is_on = gt(rate, zero);

    Tensor numerator = zero, denominator = zero;
    std::vector<std::vector<Tensor>> after;
    for (const ParamState& p : group.params) {
      const Tensor g = a_.decouple || a_.weight_decay == 0 ? p.gradient : p.gradient + p.value * a_.weight_decay;
      numerator = numerator + sum(g * (p.slots[3] - p.value));
      after.push_back({p.slots[0] * b1 + g * (d * (1 - b1)), p.slots[1] * b2 + square(g) * (square(d) * (1 - b2)),
                       p.slots[2] * b3 + g * of_sum});
      denominator = denominator + sum(abs(after.back()[2]));
    }
    numerator = group.scalars[2] * b3 + numerator * (relative * d_rate);
    const Tensor moves = bit_and(is_on, gt(denominator, zero));
    const Tensor estimate = numerator * a_.d_coef / where(moves, denominator, scalar_like(d, 1));
    const Tensor first = where(eq(d, scalar_like(d, a_.d0)), maximum(d, estimate), d);
    const Tensor d_max = maximum(group.scalars[1], estimate);
    const Tensor next = std::isinf(a_.growth_rate) ? d_max : minimum(d_max, first * a_.growth_rate);
    const Tensor shared[] = {next, d_max, numerator};
    for (size_t i = 0; i < 3; ++i) group.scalars[i] = where(moves, shared[i], group.scalars[i]);

    for (size_t i = 0; i < group.params.size(); ++i) {
      ParamState& p = group.params[i];
      for (size_t k = 0; k < after[i].size(); ++k) p.slots[k] = where(is_on, after[i][k], p.slots[k]);
      Tensor direction = after[i][0] / (sqrt(after[i][1]) + next * a_.eps);
      if (a_.decouple && a_.weight_decay != 0) direction = direction + p.value * a_.weight_decay;
      p.value = where(moves, p.value - direction * d_rate, p.value);
    }
    return group;
  }

  std::string full_name() const override { return called("prodigyopt.prodigy.Prodigy", as_arguments(a_)); }

 private:
  ProdigyArgs a_;
};

}  // namespace

OptimizerEntry prodigy() { return optimizer_with_arguments<Prodigy, ProdigyArgs>("prodigy"); }

}  // namespace md
