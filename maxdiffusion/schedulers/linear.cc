#include "maxdiffusion/schedulers/linear.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

class Linear final : public Scheduler {
 public:
  explicit Linear(LinearSampler sampler) : s_(std::move(sampler)) {}

  std::string name() const override { return s_.name; }
  int64_t history() const override { return s_.history; }

  SampleTable table(int64_t steps) const override {
    const size_t width = (s_.clip > 0 ? 3 : 2) + static_cast<size_t>(s_.history);
    size_t used = 0;
    auto next_unit = [&] {
      Form f(width);
      f[used++] = 1;
      return f;
    };
    Knowns k{.sample = next_unit(), .output = next_unit(), .clipped = {}, .history = {}};
    if (s_.clip > 0) k.clipped = next_unit();
    while (used < width) k.history.push_back(next_unit());

    LinearPlan plan = s_.plan(steps, k);
    std::vector<float> flat;
    auto put = [&](double v) { flat.push_back(static_cast<float>(v)); };
    for (const LinearStep& step : plan.steps) {
      check(step.next.size() == k.history.size() + 1, Code::internal, "{}: a step makes {} arrays; expected {}",
            s_.name, step.next.size(), k.history.size() + 1);
      put(step.input_scale);
      if (s_.clip > 0) put(step.x0[0]), put(step.x0[1]);
      for (const Form& f : step.next) std::for_each(std::begin(f), std::end(f), put);
      if (s_.stochastic) put(step.noise);
    }
    const auto n = static_cast<int64_t>(plan.steps.size());
    return {.timesteps = plan.timesteps,
            .rows = HostArray::of<float>({DType::f32, {n, static_cast<int64_t>(flat.size()) / n}}, flat),
            .init_noise_sigma = plan.init_noise_sigma};
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
    if (s_.clip > 0) known.push_back(clamp(sum(), -s_.clip, s_.clip));
    for (const Tensor& x : history) known.push_back(cast(x, DType::f32));
    std::vector<Tensor> next;
    for (int64_t i = 0; i <= s_.history; ++i) next.push_back(sum());
    if (s_.stochastic) next[0] = next[0] + random_normal(noise, next[0].shape()) * column(row, at);
    for (Tensor& x : next) x = cast(x, sample.dtype());
    return next;
  }

 private:
  /// Column `i` of a row [columns], as a scalar.
  static Tensor column(Tensor row, int64_t i) { return reshape(slice(row, {i}, {i + 1}), {}); }

  LinearSampler s_;
};

}  // namespace

std::unique_ptr<Scheduler> linear_sampler(LinearSampler sampler) {
  return std::make_unique<Linear>(std::move(sampler));
}

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
