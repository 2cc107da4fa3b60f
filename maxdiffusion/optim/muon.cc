// Muon: momentum of matrices, orthogonalized by Newton–Schulz iteration; AdamW for other parameters. As
// torch.optim.Muon, in float32. Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks";
// Liu et al. 2025, "Muon is Scalable for LLM Training" (match_rms_adamw).

#include <algorithm>
#include <cmath>

#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"
#include "maxdiffusion/optim/factored.h"
#include "maxdiffusion/optim/moments.h"
#include "maxdiffusion/optim/optimizer_entry.h"

namespace md {
namespace {

struct MuonArgs {
  double weight_decay = 0.1, momentum = 0.95, eps = 1e-7, ns_steps = 5, adamw_eps = 1e-8, adamw_lr_ratio = 1;
  bool nesterov = true;
  std::vector<double> ns_coefficients = {3.4445, -4.775, 2.0315}, adamw_betas = {0.9, 0.999};
  std::string adjust_lr_fn = "original";
  template <class V>
  void visit(V&& v) {
    v("weight_decay", weight_decay, "decoupled weight decay, of all weights", at_least(0));
    v("momentum", momentum, "decay of the average of gradients", in_range(0, below(1)));
    v("nesterov", nesterov, "look ahead along that average");
    v("ns_coefficients", ns_coefficients, "of the polynomial of Newton–Schulz", finite());
    v("eps", eps, "the least norm that a matrix is divided by", at_least(above(0)));
    v("ns_steps", ns_steps, "steps of Newton–Schulz", in_range(0, 99));
    v("adjust_lr_fn", adjust_lr_fn,
      "factor of the learning rate of a matrix of A rows and B columns: original, √max(1, A/B); match_rms_adamw, "
      "0.2·√max(A, B), with AdamW's learning rates; spectral_unclamped, √(A/B)",
      std::vector<std::string>{"original", "match_rms_adamw", "spectral_unclamped"});
    v("adamw_betas", adamw_betas, "decays of the moments of what is no matrix", in_range(0, below(1)));
    v("adamw_eps", adamw_eps, "added outside the root there", at_least(0));
    v("adamw_lr_ratio", adamw_lr_ratio, "factor of the learning rate there", at_least(0));
  }
};

std::optional<StateArray> matrix_form(const ParamForm& p) {
  return unfactored_form(p) ? std::nullopt : std::optional(StateArray{{DType::f32, p.dims}, p.axes});
}

class Muon final : public Optimizer {
 public:
  explicit Muon(MuonArgs args) : a_(std::move(args)) {}

  std::vector<StateSlot> slots() const override {
    return {{.prefix = "muon_momentum/", .form = matrix_form},
            {.prefix = "muon_adamw_m/", .form = unfactored_form},
            {.prefix = "muon_adamw_v/", .form = unfactored_form}};
  }

  UpdateRule rule(const StepScalars& s) const override {
    const Tensor correction1 = bias_correction(a_.adamw_betas[0], s.updates),
                 correction2 = bias_correction(a_.adamw_betas[1], s.updates);
    return [=, this, a = a_, rate = s.learning_rate](const ParamState& p) {
      const Tensor g = p.gradient, decayed = p.value * (1.0 - rate * a.weight_decay);
      if (p.own_rank() < 2) {
        const Tensor m = p.slots[1] * a.adamw_betas[0] + g * (1 - a.adamw_betas[0]);
        const Tensor v = p.slots[2] * a.adamw_betas[1] + square(g) * (1 - a.adamw_betas[1]);
        const Tensor direction = (m / correction1) / (sqrt(v / correction2) + a.adamw_eps);
        const Tensor vector_rate = rate * a.adamw_lr_ratio;
        return std::vector<Tensor>{p.value * (1.0 - vector_rate * a.weight_decay) - direction * vector_rate, {}, m, v};
      }
      const Tensor average = p.slots[0] * a.momentum + g * (1 - a.momentum);
      const Tensor ahead = a.nesterov ? g * (1 - a.momentum) + average * a.momentum : average;
      // As matrices: a row has all weights of one output channel of a convolution. Gathered on every device, because
      // products of sharded matrices would be communicated in every iteration.
      const int64_t layers = std::max<int64_t>(p.stacked, 1), rows = p.value.dim(p.first());
      const int64_t columns = p.value.shape().elements() / layers / rows;
      const Tensor whole = shard_axes(ahead, DimAxes(static_cast<size_t>(ahead.rank())));
      const Tensor direction = reshape(orthogonal(reshape(whole, {layers, rows, columns})), p.value.dims());
      return std::vector<Tensor>{decayed - direction * (rate * factor(rows, columns)), average, {}, {}};
    };
  }

  std::string full_name() const override { return called("torch.optim._muon.Muon", as_arguments(a_)); }

 private:
  double factor(int64_t rows, int64_t columns) const {
    const auto a = static_cast<double>(rows), b = static_cast<double>(columns);
    if (a_.adjust_lr_fn == "match_rms_adamw") return 0.2 * std::sqrt(std::max(a, b));
    return std::sqrt(a_.adjust_lr_fn == "original" ? std::max(1.0, a / b) : a / b);
  }

  /// [n, A, B] → approximately U·Vᵀ of each matrix's singular value decomposition.
  Tensor orthogonal(Tensor x) const {
    const bool tall = x.dim(1) > x.dim(2);
    if (tall) x = transpose(x, {0, 2, 1});
    const Tensor norm = sqrt(sum(square(x), {1, 2}, true));
    x = x / maximum(norm, scalar_like(norm, a_.eps));
    const int64_t rows = x.dim(1);
    const auto gram_of = [](Tensor m) {
      return dot(m, m, {.lhs_contract = {2}, .rhs_contract = {2}, .lhs_batch = {0}, .rhs_batch = {0}});
    };
    const Shape square_shape{x.dtype(), {1, rows, rows}};
    const Tensor identity = cast(eq(iota(x.graph(), square_shape, 1), iota(x.graph(), square_shape, 2)), x.dtype());
    const auto polynomial = [&](Tensor gram) {
      return identity * a_.ns_coefficients[0] + gram * a_.ns_coefficients[1] +
             matmul(gram, gram) * a_.ns_coefficients[2];
    };
    const int steps = static_cast<int>(a_.ns_steps);
    if (x.dim(2) < 2 * rows || steps < 2) {
      for (int i = 0; i < steps; ++i) x = matmul(polynomial(gram_of(x)), x);
    } else {
      // Polynomials of one matrix commute, so the steps of a wide matrix are multiplied before it: products of
      // [A, A] take fewer operations.
      Tensor gram = gram_of(x), product;
      for (int i = 0; i < steps; ++i) {
        const Tensor p = polynomial(gram);
        product = product ? matmul(p, product) : p;
        if (i + 1 < steps) gram = matmul(p, matmul(p, gram));
      }
      x = matmul(product, x);
    }
    return tall ? transpose(x, {0, 2, 1}) : x;
  }

  MuonArgs a_;
};

}  // namespace

OptimizerEntry muon() { return optimizer_with_arguments<Muon, MuonArgs>("muon"); }

}  // namespace md
