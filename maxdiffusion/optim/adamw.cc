// AdamW: decoupled weight decay, bias-corrected moments. Source: Loshchilov and Hutter 2019.

#include <fmt/format.h>

#include <cmath>

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/optim/moments.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct AdamwKeys {
  double adam_b1 = 0.9, adam_b2 = 0.999, adam_eps = 1e-8, adam_weight_decay = 1e-2;
  template <class V>
  void visit(V&& v) {
    v("adam_b1", adam_b1, "decay of the first moment", in_range(0, below(1)));
    v("adam_b2", adam_b2, "decay of the second moment", in_range(0, below(1)));
    v("adam_eps", adam_eps, "added outside the root", at_least(0));
    v("adam_weight_decay", adam_weight_decay, "decoupled weight decay", at_least(0));
  }
};

class Adamw final : public Optimizer {
 public:
  explicit Adamw(const AdamwKeys& keys) : k_(keys) {}

  std::vector<StateSlot> slots() const override { return {{"adam_m/"}, {"adam_v/"}}; }

  UpdateRule rule(const StepScalars& s) const override {
    const Tensor correction1 = bias_correction(k_.adam_b1, s.updates),
                 correction2 = bias_correction(k_.adam_b2, s.updates);
    return [=, k = k_, rate = s.learning_rate](const ParamState& p) {
      const Tensor m = p.slots[0] * k.adam_b1 + p.gradient * (1 - k.adam_b1);
      const Tensor v = p.slots[1] * k.adam_b2 + square(p.gradient) * (1 - k.adam_b2);
      Tensor direction = (m / correction1) / (sqrt(v / correction2) + k.adam_eps);
      if (k.adam_weight_decay != 0) direction = direction + p.value * k.adam_weight_decay;
      return std::vector<Tensor>{p.value - direction * rate, m, v};
    };
  }

  std::vector<FusedCall> fused(const StepScalars& s, double max_value, Tensor factor) const override {
    return {adamw_call(kAdamwKernel, k_.adam_b1, k_.adam_b2, k_.adam_eps, k_.adam_weight_decay, s, max_value, factor)};
  }

  std::string full_name() const override {
    return fmt::format("torch.optim.adamw.AdamW(betas=({}, {}),eps={},weight_decay={})", k_.adam_b1, k_.adam_b2,
                       k_.adam_eps, k_.adam_weight_decay);
  }

 private:
  AdamwKeys k_;
};

}  // namespace

Tensor bias_correction(double b, Tensor updates) { return -expm1((updates + 1.0) * std::log(b)); }

FusedCall adamw_call(const char* kernel, double b1, double b2, double eps, double weight_decay, const StepScalars& s,
                     double max_value, Tensor factor) {
  return {.kernel = kernel,
          .config = fmt::format("b1 = {:.17e} : f64, b2 = {:.17e} : f64, eps = {:.17e} : f64, weight_decay = {:.17e} : "
                                "f64, max_value = {:.17e} : f64, averages = {} : i64",
                                b1, b2, eps, weight_decay, max_value, s.keep ? 1 : 0),
          .scalars = stack({s.learning_rate, bias_correction(b1, s.updates), bias_correction(b2, s.updates), factor,
                            cast(s.applied, DType::f32), s.keep ? s.keep : scalar_like(s.learning_rate, 1.0)},
                           0)};
}

OptimizerEntry adamw() { return optimizer_entry<Adamw, AdamwKeys>("adamw"); }

}  // namespace md
