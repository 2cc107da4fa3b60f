// Stochastic gradient descent with momentum and weight decay, as torch.optim.SGD. Source: Sutskever et al. 2013.

#include <fmt/format.h>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct SgdKeys {
  double sgd_momentum = 0.9, sgd_weight_decay = 0;
  bool sgd_nesterov = false;
  template <class V>
  void visit(V&& v) {
    v("sgd_momentum", sgd_momentum, "decay of the sum of gradients that moves the weights; 0: the gradient does",
      at_least(0));
    v("sgd_nesterov", sgd_nesterov, "look ahead along that sum (Nesterov)");
    v("sgd_weight_decay", sgd_weight_decay, "part of the weights that is added to their gradients", at_least(0));
  }
};

class Sgd final : public Optimizer {
 public:
  explicit Sgd(const SgdKeys& keys) : k_(keys) {
    check(!k_.sgd_nesterov || k_.sgd_momentum > 0, Code::invalid_config,
          "sgd_nesterov needs sgd_momentum, which is {}; expected more than 0", k_.sgd_momentum);
  }

  std::vector<StateSlot> slots() const override {
    if (k_.sgd_momentum == 0) return {};
    return {{"sgd_momentum/"}};
  }

  UpdateRule rule(const StepScalars& s) const override {
    return [k = k_, rate = s.learning_rate](const ParamState& p) {
      Tensor g = p.gradient;
      if (k.sgd_weight_decay != 0) g = g + p.value * k.sgd_weight_decay;
      if (p.slots.empty()) return std::vector<Tensor>{p.value - g * rate};
      const Tensor sum = p.slots[0] * k.sgd_momentum + g;
      return std::vector<Tensor>{p.value - (k.sgd_nesterov ? g + sum * k.sgd_momentum : sum) * rate, sum};
    };
  }

  std::string full_name() const override {
    return fmt::format("torch.optim.sgd.SGD(momentum={},weight_decay={},nesterov={})", k_.sgd_momentum,
                       k_.sgd_weight_decay, k_.sgd_nesterov ? "True" : "False");
  }

 private:
  SgdKeys k_;
};

}  // namespace

OptimizerEntry sgd() { return optimizer_entry<Sgd, SgdKeys>("sgd"); }

}  // namespace md
