// Adafactor as in transformers: second moments of matrices from the means of their rows and columns, steps relative to
// the size of the weights. Source: Shazeer and Stern 2018.

#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/factored.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct AdafactorArgs {
  std::vector<double> eps = {1e-30, 1e-3};
  double clip_threshold = 1, decay_rate = -0.8, weight_decay = 0;
  std::optional<double> beta1;
  bool scale_parameter = true, relative_step = true, warmup_init = false;
  template <class V>
  void visit(V&& v) {
    v("eps", eps, "added to squares of the gradient; the least size of weights that steps are relative to",
      at_least(0));
    v("clip_threshold", clip_threshold, "the largest root mean square of an update before the learning rate",
      at_least(above(0)));
    v("decay_rate", decay_rate, "exponent of the update's number in what second moments forget", at_most(0));
    v("beta1", beta1, "decay of a first moment; None: there is none", in_range(0, below(1)));
    v("weight_decay", weight_decay, "decoupled weight decay", at_least(0));
    v("scale_parameter", scale_parameter, "steps are relative to the root mean square of the weights");
    v("relative_step", relative_step,
      "steps are min(1e-2, 1/√n) in update n and learning_rate is not read; False: learning_rate");
    v("warmup_init", warmup_init, "with relative_step: steps begin at 1e-6·n");
  }
};

class Adafactor final : public Optimizer {
 public:
  explicit Adafactor(AdafactorArgs args) : a_(std::move(args)) {
    check(!a_.warmup_init || a_.relative_step, Code::invalid_config,
          "optimizer_args: warmup_init=True needs relative_step=True; found relative_step=False");
  }

  std::vector<StateSlot> slots() const override {
    std::vector<StateSlot> slots = {{.prefix = "adafactor_rows/", .form = row_means_form},
                                    {.prefix = "adafactor_columns/", .form = column_means_form},
                                    {.prefix = "adafactor_v/", .form = unfactored_form}};
    if (a_.beta1) slots.push_back({"adafactor_m/"});
    return slots;
  }
  bool has_own_rate() const override { return a_.relative_step; }

  UpdateRule rule(const StepScalars& s) const override {
    const auto [rate, decay, added] = rates(s);
    return [=, a = a_, rate = rate, decay = decay, added = added](const ParamState& p) {
      Tensor size = rate;
      if (a.scale_parameter) {
        const Tensor of_weights = root_mean_square(p, p.value);
        size = maximum(of_weights, scalar_like(of_weights, a.eps[1])) * rate;
      }
      const Tensor squares = square(p.gradient) + a.eps[0];
      std::vector<Tensor> after = {p.value, {}, {}, {}};
      Tensor update;
      if (p.own_rank() >= 2) {
        const FactoredMeans means = with_squares({p.slots[0], p.slots[1]}, squares, decay, added);
        after[1] = means.rows, after[2] = means.columns;
        update = inverse_root(means) * p.gradient;
      } else {
        after[3] = p.slots[2] * decay + squares * added;
        update = rsqrt(after[3]) * p.gradient;
      }
      update = within_root_mean_square(p, update, a.clip_threshold) * size;
      if (a.beta1) {
        update = p.slots[3] * *a.beta1 + update * (1 - *a.beta1);
        after.push_back(update);
      }
      if (a.weight_decay != 0) update = update + p.value * (size * a.weight_decay);
      after[0] = p.value - update;
      return after;
    };
  }

  std::vector<FusedCall> fused(const StepScalars& s, double max_value, Tensor factor) const override {
    const auto [rate, decay, added] = rates(s);
    FusedCall factored{
        .kernel = kAdafactorKernel,
        .config = fmt::format("eps = {:.17e} : f64, least_size = {:.17e} : f64, clip_threshold = {:.17e} : f64, "
                              "b1 = {:.17e} : f64, weight_decay = {:.17e} : f64, max_value = {:.17e} : f64, "
                              "relative = {}, averages = {} : i64",
                              a_.eps[0], a_.eps[1], a_.clip_threshold, a_.beta1.value_or(-1), a_.weight_decay,
                              max_value, a_.scale_parameter, s.keep ? 1 : 0),
        .scalars = stack({rate, decay, added, factor, cast(s.applied, DType::f32),
                          s.keep ? s.keep : scalar_like(s.learning_rate, 1.0)},
                         0),
        .slots = {0, 1},
        .layers = true,
        .whole = true};
    FusedCall whole = factored;
    whole.slots = {2};
    if (a_.beta1) factored.slots.push_back(3), whole.slots.push_back(3);
    return by_rank(factored, whole);
  }

  std::string full_name() const override { return called("transformers.optimization.Adafactor", as_arguments(a_)); }

 private:
  struct Rates {
    Tensor rate, decay, added;
  };
  Rates rates(const StepScalars& s) const {
    const Tensor n = s.updates + 1.0, added = pow(n, scalar_like(n, a_.decay_rate));
    Tensor rate = s.learning_rate;
    if (a_.relative_step) rate = rate * minimum(a_.warmup_init ? n * 1e-6 : scalar_like(n, 1e-2), rsqrt(n));
    return {rate, 1.0 - added, added};
  }

  AdafactorArgs a_;
};

}  // namespace

OptimizerEntry adafactor() { return optimizer_with_arguments<Adafactor, AdafactorArgs>("adafactor"); }

}  // namespace md
