// Learning rate over the run: the shape is a function of the update number, written once for graph and host.

#include <cmath>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

constexpr double kPolynomialEnd = 1e-7;  // the rate at which diffusers' polynomial decay ends

/// Numbers of updates of the warm-up and of the schedule.
struct Span {
  double warmup, total;
};
Span span_of(const OptimConfig& c) {
  const int64_t total = c.learning_rate_schedule_steps < 0 ? c.max_train_steps : c.learning_rate_schedule_steps;
  check(c.warmup_steps_fraction >= 0 && c.warmup_steps_fraction <= 1, Code::invalid_config,
        "warmup_steps_fraction is {}; expected 0 to 1", c.warmup_steps_fraction);
  const auto warmup = static_cast<int64_t>(static_cast<double>(total) * c.warmup_steps_fraction);
  return {static_cast<double>(warmup), static_cast<double>(total)};
}

/// What a schedule needs of its number type, so that f32 tensors and doubles share one formula.
struct HostMath {
  double step;
  double cosine(double x) const { return std::cos(x); }
  double power(double x, double p) const { return std::pow(x, p); }
  double fraction(double x) const { return x - std::floor(x); }
  double low(double x, double limit) const { return std::min(x, limit); }
  double before(double limit, double a, double b) const { return step < limit ? a : b; }
};
struct GraphMath {
  Tensor step;  // f32
  Tensor cosine(Tensor x) const { return cos(x); }
  Tensor power(Tensor x, double p) const { return pow(x, scalar_like(x, p)); }
  Tensor fraction(Tensor x) const { return x - floor(x); }
  Tensor low(Tensor x, double limit) const { return minimum(x, scalar_like(x, limit)); }
  Tensor before(double limit, Tensor a, Tensor b) const { return where(lt(step, scalar_like(step, limit)), a, b); }
};

/// The rate as a part of the peak.
template <class Math>
auto factor(const OptimConfig& c, const Math& m) {
  const auto [warmup, total] = span_of(c);
  auto flat = m.step * 0.0 + 1.0;
  auto with_warmup = [&, warmup = warmup](auto rest) {
    return warmup > 0 ? m.before(warmup, m.step / warmup, rest) : rest;
  };
  const double decay = std::max(1.0, total - warmup);
  auto progress = m.low((m.step - warmup) / decay, 1.0);
  if (c.lr_scheduler == "constant") return flat;
  if (c.lr_scheduler == "constant_with_warmup") return with_warmup(flat);
  if (c.lr_scheduler == "linear") return with_warmup(1.0 - progress);
  if (c.lr_scheduler == "cosine") return with_warmup(m.cosine(progress * std::numbers::pi) * 0.5 + 0.5);
  if (c.lr_scheduler == "cosine_with_restarts") {
    auto wave = m.cosine(m.fraction(progress * c.lr_num_cycles) * std::numbers::pi) * 0.5 + 0.5;
    return with_warmup(m.before(total, wave, flat * 0.0));
  }
  if (c.lr_scheduler == "polynomial") {
    const double end = kPolynomialEnd / c.learning_rate;
    return with_warmup(m.power(1.0 - progress, c.lr_power) * (1 - end) + end);
  }
  fail(Code::invalid_config, "lr_scheduler is '{}'; expected one of: {}", c.lr_scheduler,
       nearest_first(c.lr_scheduler,
                     {"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"}));
}

}  // namespace

OptimConfig OptimConfig::with_switches(bool always_by_norm) const {
  OptimConfig c = *this;
  if (!opt_enable_grad_clipping) c.max_grad_value = 0;
  if (!opt_enable_grad_global_norm_clipping && !always_by_norm) c.max_grad_norm = 0;
  return c;
}

Tensor learning_rate(const OptimConfig& config, Tensor step) {
  return factor(config, GraphMath{cast(step, DType::f32)}) * config.learning_rate;
}

double learning_rate(const OptimConfig& config, int64_t step) {
  return factor(config, HostMath{static_cast<double>(step)}) * config.learning_rate;
}

}  // namespace md
