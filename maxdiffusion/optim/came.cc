// CAME: Adafactor's moments, and a first moment whose steps are smaller where updates disagree with it. As in
// came-pytorch. Source: Luo et al. 2023, "CAME: Confidence-guided Adaptive Memory Efficient Optimization".

#include <fmt/format.h>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/factored.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct CameArgs {
  std::vector<double> betas = {0.9, 0.999, 0.9999}, eps = {1e-30, 1e-16};
  double clip_threshold = 1, weight_decay = 0;
  template <class V>
  void visit(V&& v) {
    v("betas", betas, "decays of the update's average, of its square's and of its instability's", in_range(0, 1));
    v("eps", eps, "added to squares of the gradient, and to squares of the instability", at_least(0));
    v("clip_threshold", clip_threshold, "the largest root mean square of an update before the learning rate",
      at_least(above(0)));
    v("weight_decay", weight_decay, "decoupled weight decay", at_least(0));
  }
};

class Came final : public Optimizer {
 public:
  explicit Came(CameArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override {
    return {{"came_m/"},
            {.prefix = "came_rows/", .form = row_means_form},
            {.prefix = "came_columns/", .form = column_means_form},
            {.prefix = "came_unstable_rows/", .form = row_means_form},
            {.prefix = "came_unstable_columns/", .form = column_means_form},
            {.prefix = "came_v/", .form = unfactored_form}};
  }

  UpdateRule rule(const StepScalars& s) const override {
    return [a = a_, rate = s.learning_rate](const ParamState& p) {
      const auto with = [&](const FactoredMeans& means, Tensor x, double b) {
        return with_squares(means, x, scalar_like(x, b), scalar_like(x, 1 - b));
      };
      const bool factored = p.own_rank() >= 2;
      const Tensor squares = square(p.gradient) + a.eps[0];
      std::vector<Tensor> after(7);
      Tensor update;
      if (factored) {
        const FactoredMeans means = with({p.slots[1], p.slots[2]}, squares, a.betas[1]);
        after[2] = means.rows, after[3] = means.columns;
        update = inverse_root(means) * p.gradient;
      } else {
        after[6] = p.slots[5] * a.betas[1] + squares * (1 - a.betas[1]);
        update = rsqrt(after[6]) * p.gradient;
      }
      update = within_root_mean_square(p, update, a.clip_threshold);
      const Tensor m = p.slots[0] * a.betas[0] + update * (1 - a.betas[0]);
      after[1] = m;
      Tensor direction = m;
      if (factored) {
        const FactoredMeans unstable = with({p.slots[3], p.slots[4]}, square(update - m) + a.eps[1], a.betas[2]);
        after[4] = unstable.rows, after[5] = unstable.columns;
        direction = inverse_root(unstable) * m;
      }
      if (a.weight_decay != 0) direction = direction + p.value * a.weight_decay;
      after[0] = p.value - direction * rate;
      return after;
    };
  }

  std::vector<FusedCall> fused(const StepScalars& s, double max_value, Tensor factor) const override {
    FusedCall factored{
        .kernel = kCameKernel,
        .config = fmt::format("b1 = {:.17e} : f64, b2 = {:.17e} : f64, b3 = {:.17e} : f64, eps = {:.17e} : f64, "
                              "eps_unstable = {:.17e} : f64, clip_threshold = {:.17e} : f64, weight_decay = {:.17e} : "
                              "f64, max_value = {:.17e} : f64, averages = {} : i64",
                              a_.betas[0], a_.betas[1], a_.betas[2], a_.eps[0], a_.eps[1], a_.clip_threshold,
                              a_.weight_decay, max_value, s.keep ? 1 : 0),
        .scalars = stack(
            {s.learning_rate, factor, cast(s.applied, DType::f32), s.keep ? s.keep : scalar_like(s.learning_rate, 1.0)},
            0),
        .slots = {0, 1, 2, 3, 4},
        .layers = true,
        .whole = true};
    FusedCall whole = factored;
    whole.slots = {0, 5};
    return by_rank(factored, whole);
  }

  std::string full_name() const override { return called("came_pytorch.CAME.CAME", as_arguments(a_)); }

 private:
  CameArgs a_;
};

}  // namespace

OptimizerEntry came() { return optimizer_with_arguments<Came, CameArgs>("came"); }

}  // namespace md
