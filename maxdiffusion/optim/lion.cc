// Lion: the sign of two averages of the gradient. As lion-pytorch. Source: Chen et al. 2023, "Symbolic Discovery of
// Optimization Algorithms".

#include <fmt/format.h>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct LionArgs {
  std::vector<double> betas = {0.9, 0.99};
  double weight_decay = 0;
  template <class V>
  void visit(V&& v) {
    v("betas", betas, "what the momentum keeps: in the update's sign, in itself", in_range(0, 1));
    v("weight_decay", weight_decay, "decoupled weight decay", at_least(0));
  }
};

class Lion final : public Optimizer {
 public:
  explicit Lion(LionArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override { return {{"lion_m/"}}; }

  UpdateRule rule(const StepScalars& s) const override {
    return [a = a_, rate = s.learning_rate](const ParamState& p) {
      const Tensor m = p.slots[0], g = p.gradient;
      Tensor direction = sign(m * a.betas[0] + g * (1 - a.betas[0]));
      if (a.weight_decay != 0) direction = direction + p.value * a.weight_decay;
      return std::vector<Tensor>{p.value - direction * rate, m * a.betas[1] + g * (1 - a.betas[1])};
    };
  }

  std::vector<FusedCall> fused(const StepScalars& s, double max_value, Tensor factor) const override {
    return {FusedCall{.kernel = kLionKernel,
                      .config = fmt::format("b1 = {:.17e} : f64, b2 = {:.17e} : f64, weight_decay = {:.17e} : f64, "
                                            "max_value = {:.17e} : f64, averages = {} : i64",
                                            a_.betas[0], a_.betas[1], a_.weight_decay, max_value, s.keep ? 1 : 0),
                      .scalars = stack({s.learning_rate, factor, cast(s.applied, DType::f32),
                                        s.keep ? s.keep : scalar_like(s.learning_rate, 1.0)},
                                       0)}};
  }

  std::string full_name() const override { return called("lion_pytorch.lion_pytorch.Lion", as_arguments(a_)); }

 private:
  LionArgs a_;
};

}  // namespace

OptimizerEntry lion() { return optimizer_with_arguments<Lion, LionArgs>("lion"); }

}  // namespace md
