// Learning-rate schedules: a function of the update's number, written once for graph and host.

#include <algorithm>
#include <cmath>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/optim/optimizer.h"

namespace md {
namespace {

constexpr double kPolynomialEnd = 1e-7;  // the rate at which diffusers' polynomial decay ends

/// Numbers of updates of the warm-up, of the final descent and of the schedule.
struct Span {
  double warmup, descent, total;
};
Span span_of(const OptimConfig& c) {
  const int64_t total = c.learning_rate_schedule_steps < 0 ? c.max_train_steps : c.learning_rate_schedule_steps;
  check(c.warmup_steps_fraction >= 0 && c.warmup_steps_fraction <= 1, Code::invalid_config,
        "warmup_steps_fraction is {}; expected 0 to 1", c.warmup_steps_fraction);
  const auto all = static_cast<double>(total);
  const auto updates = [all](double value) { return std::floor(value < 1 ? value * all : value); };
  return {c.lr_warmup_steps < 0 ? std::floor(all * c.warmup_steps_fraction) : updates(c.lr_warmup_steps),
          updates(c.lr_decay_steps), all};
}

/// Operations that schedules need of their number type, so that f32 tensors and doubles share one formula.
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

/// Learning rate / peak learning rate.
template <class Math>
auto factor(const OptimConfig& c, const Math& m) {
  const auto [warmup, descent, total] = span_of(c);
  auto flat = m.step * 0.0 + 1.0;
  auto with_warmup = [&, warmup = warmup](auto rest) {
    return warmup > 0 ? m.before(warmup, m.step / warmup, rest) : rest;
  };
  const double decay = std::max(1.0, total - warmup);
  auto progress = m.low((m.step - warmup) / decay, 1.0);
  if (c.lr_scheduler == "constant") return flat;
  if (c.lr_scheduler == "constant_with_warmup") return with_warmup(flat);
  if (c.lr_scheduler == "linear") return with_warmup(1.0 - progress);
  // Ends at a fraction of the peak.
  auto above_end = [&](auto rest) {
    const double end = c.lr_scheduler_min_lr_ratio;
    return end > 0 ? rest * (1 - end) + end : rest;
  };
  if (c.lr_scheduler == "cosine") return with_warmup(above_end(m.cosine(progress * std::numbers::pi) * 0.5 + 0.5));
  if (c.lr_scheduler == "rex") return with_warmup(above_end((1.0 - progress) / (1.0 - progress * 0.5)));
  if (c.lr_scheduler == "warmup_stable_decay") {
    check(descent > 0 && warmup + descent <= total, Code::invalid_config,
          "lr_decay_steps: {} updates, after {} of warming up; expected 1 or more, and at most {} together", descent,
          warmup, total);
    auto part = m.low((m.step - (total - descent)) / descent, 1.0);
    auto wave = m.cosine(part * (std::numbers::pi * c.lr_num_cycles)) * 0.5 + 0.5;
    auto after_warmup = m.before(total - descent, flat, above_end(m.before(total, wave, flat * 0.0)));
    return warmup > 0 ? m.before(warmup, above_end(m.step / warmup), after_warmup) : after_warmup;
  }
  if (c.lr_scheduler == "cosine_with_restarts") {
    auto wave = m.cosine(m.fraction(progress * c.lr_num_cycles) * std::numbers::pi) * 0.5 + 0.5;
    return with_warmup(m.before(total, wave, flat * 0.0));
  }
  if (c.lr_scheduler == "polynomial") {
    const double end = kPolynomialEnd / c.learning_rate;
    return with_warmup(m.power(1.0 - progress, c.lr_power) * (1 - end) + end);
  }
  fail(Code::invalid_config, "lr_scheduler is '{}'; expected one of: {}", c.lr_scheduler,
       nearest_first(c.lr_scheduler, schedule_names()));
}

}  // namespace

OptimConfig OptimConfig::with_switches(bool always_by_norm) const {
  OptimConfig c = *this;
  if (!opt_enable_grad_clipping) c.max_grad_value = 0;
  if (!opt_enable_grad_global_norm_clipping && !always_by_norm) c.max_grad_norm = 0;
  return c;
}

std::vector<std::string> schedule_names() {
  return {"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial",
          "rex",      "warmup_stable_decay"};
}

int64_t warmup_updates(const OptimConfig& config) {
  return std::max<int64_t>(0, static_cast<int64_t>(span_of(config).warmup));
}

Tensor learning_rate(const OptimConfig& config, Tensor step) {
  return factor(config, GraphMath{cast(step, DType::f32)}) * config.learning_rate;
}

double learning_rate(const OptimConfig& config, int64_t step) {
  return factor(config, HostMath{static_cast<double>(step)}) * config.learning_rate;
}

}  // namespace md
