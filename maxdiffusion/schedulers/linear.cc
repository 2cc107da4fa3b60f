#include "maxdiffusion/schedulers/linear.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

class Linear final : public Scheduler {
 public:
  explicit Linear(LinearSampler sampler) : s_(std::move(sampler)) {}

  std::string name() const override { return s_.name; }
  bool stochastic() const override { return s_.stochastic; }
  int64_t history() const override { return s_.history; }

  SampleTable table(int64_t steps, int64_t first) const override {
    const size_t width = (s_.clips() ? 3 : 2) + static_cast<size_t>(s_.history);
    size_t used = 0;
    auto next_unit = [&] {
      Form f(width);
      f[used++] = 1;
      return f;
    };
    Knowns k{.sample = next_unit(), .output = next_unit(), .clipped = {}, .history = {}, .first = first};
    if (s_.clips()) k.clipped = next_unit();
    while (used < width) k.history.push_back(next_unit());

    LinearPlan plan = s_.plan(steps, k);
    const int64_t left_out = first * plan.calls;
    check(first >= 0 && left_out < std::ssize(plan.steps), Code::internal, "{}: step {} of {} is none", s_.name, first,
          steps);
    plan.steps.erase(plan.steps.begin(), plan.steps.begin() + left_out);
    if (plan.training_timesteps.empty()) plan.training_timesteps = plan.timesteps;
    for (std::vector<double>* times : {&plan.timesteps, &plan.training_timesteps})
      times->erase(times->begin(), times->begin() + left_out);
    std::vector<float> flat;
    std::vector<NoiseLevel> levels;
    std::vector<double> renoise;
    auto put = [&](double v) { flat.push_back(static_cast<float>(v)); };
    for (const LinearStep& step : plan.steps) {
      levels.push_back(step.level);
      check(step.next.size() == k.history.size() + 1, Code::internal, "{}: a step makes {} arrays; expected {}",
            s_.name, step.next.size(), k.history.size() + 1);
      put(step.input_scale);
      if (s_.clips()) put(step.x0[0]), put(step.x0[1]);
      for (const Form& f : step.next) std::for_each(std::begin(f), std::end(f), put);
      if (s_.stochastic) put(step.noise);
      if (!step.reaches) continue;
      // The sample is α·x0 + σ·ε, so if the output changes ε by d, it changes x0 by −σ/α·d.
      const NoiseLevel from = step.level, to = *step.reaches;
      const double both = to.noise * from.signal - to.signal * from.noise;
      renoise.push_back(both == 0 ? 0 : to.noise * step.next[0][1] * from.signal / both);
    }
    const auto n = static_cast<int64_t>(plan.steps.size());
    return {.timesteps = plan.timesteps,
            .training_timesteps = plan.training_timesteps,
            .rows = HostArray::of<float>({DType::f32, {n, static_cast<int64_t>(flat.size()) / n}}, flat),
            .init_noise_sigma = plan.init_noise_sigma,
            .levels = levels,
            .renoise = renoise.size() == plan.steps.size() ? renoise : std::vector<double>{}};
  }

  Tensor scale_input(Tensor sample, Tensor row) const override { return sample * cast(column(row, 0), sample.dtype()); }

  std::vector<Tensor> step(Tensor output, Tensor sample, Tensor row, const std::vector<Tensor>& history,
                           Rng noise) const override {
    std::vector<Tensor> known = {cast(sample, DType::f32), cast(output, DType::f32)};
    int64_t at = 1;
    auto sum = [&] {
      Tensor total;
      for (const Tensor& x : known) {
        Tensor term = x * column(row, at++);
        total = total ? total + term : term;
      }
      return total;
    };
    if (s_.clips()) known.push_back(s_.threshold ? thresholded(sum()) : clamp(sum(), -s_.clip, s_.clip));
    for (const Tensor& x : history) known.push_back(cast(x, DType::f32));
    std::vector<Tensor> next;
    for (int64_t i = 0; i <= s_.history; ++i) next.push_back(sum());
    if (s_.stochastic) next[0] = next[0] + random_normal(noise, next[0].shape()) * column(row, at);
    for (Tensor& x : next) x = cast(x, sample.dtype());
    return next;
  }

 private:
  /// x0: [B, …].
  Tensor thresholded(Tensor x0) const {
    const int64_t b = x0.dim(0), n = x0.shape().elements() / b;
    const Tensor sizes = sort(reshape(abs(x0), {b, n}), {}, 1)[0];
    const double at = s_.threshold->ratio * static_cast<double>(n - 1);
    const auto low = static_cast<int64_t>(at);
    auto size = [&](int64_t i) { return slice_axis(sizes, 1, i, i + 1); };
    Tensor s = size(low);
    if (low + 1 < n) s = s + (size(low + 1) - s) * (at - static_cast<double>(low));
    s = clamp(s, std::min(1.0, s_.threshold->most), s_.threshold->most);
    Dims one(x0.dims().size(), 1);
    one[0] = b;
    return clamp(x0 / reshape(s, one), -1, 1);
  }
  /// Column `i` of a row [columns], as a scalar.
  static Tensor column(Tensor row, int64_t i) { return reshape(slice(row, {i}, {i + 1}), {}); }

  LinearSampler s_;
};

}  // namespace

std::unique_ptr<Scheduler> linear_sampler(LinearSampler sampler) {
  return std::make_unique<Linear>(std::move(sampler));
}

NoiseLevel level_of(double alpha_bar) { return {std::sqrt(alpha_bar), std::sqrt(1 - alpha_bar)}; }

Form predicted_x0(const std::string& prediction_type, double alpha, double sigma, const Knowns& k) {
  if (prediction_type == "sample") return k.output;
  if (prediction_type == "v_prediction") return alpha * k.sample - sigma * k.output;
  if (prediction_type == "flow_prediction") return k.sample - sigma * k.output;
  return (k.sample - sigma * k.output) / std::sqrt(divisible(alpha * alpha));
}

Form predicted_noise(const std::string& prediction_type, double alpha, double sigma, const Knowns& k) {
  if (prediction_type == "sample") return (k.sample - alpha * k.output) / sigma;
  if (prediction_type == "v_prediction") return alpha * k.output + sigma * k.sample;
  return k.output;
}

}  // namespace md
