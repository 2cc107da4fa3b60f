#include "maxdiffusion/pipelines/step_cache.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// [n, n] matrix that keeps the frequencies 0 to below − 1, positive and negative.
HostArray low_pass(int64_t n, int64_t below) {
  HostArray p(Shape{DType::f32, {n, n}});
  auto v = p.mutable_view<float>();
  for (int64_t i = 0; i < n * n; ++i) {
    const int64_t row = i / n, column = i % n;
    double sum = 1;
    for (int64_t k = 1; k < below; ++k)
      sum += (2 * k == n ? 1 : 2) *
             std::cos(2 * std::numbers::pi * static_cast<double>(k * (row - column)) / static_cast<double>(n));
    v[static_cast<size_t>(i)] = static_cast<float>(sum / static_cast<double>(n));
  }
  return p;
}

/// Multiplies along an axis of x by the matrix.
Tensor along(Tensor x, int64_t axis, const HostArray& matrix) {
  std::vector<int64_t> last, back;
  for (int64_t i = 0; i < x.rank(); ++i)
    if (i != axis) last.push_back(i);
  last.push_back(axis);
  back.resize(last.size());
  for (size_t i = 0; i < last.size(); ++i) back[static_cast<size_t>(last[i])] = static_cast<int64_t>(i);
  Tensor y = transpose(x, last);
  y = dot(y, constant(x.graph(), matrix), {.lhs_contract = {x.rank() - 1}, .rhs_contract = {1}});
  return transpose(y, back);
}

/// The step whose denoiser reuses `r`.
CachedStep computed_with(const DenoisingStep& step, StepReuse r) {
  const Tensor all = step.predict_reusing(r);
  return {step.combine(all), r.arrays, r.reused};
}

/// Caches the difference between the two predictions. Reused steps add it to the positive one, with amplified low
/// frequencies in early steps and high frequencies in later ones.
class CfgCache final : public StepCache {
 public:
  explicit CfgCache(const SamplingPlan& plan) {
    constexpr int64_t kEvery = 5;
    const int64_t n = plan.steps(), from = n / 3;
    const bool two = plan.stages.size() > 1;
    const int64_t to = plan.height >= 720 ? static_cast<int64_t>(static_cast<double>(n) * 0.9) : n - (two ? 1 : 2);
    reused_.resize(static_cast<size_t>(n));
    const SamplingStage& last = plan.stages.back();
    for (int64_t s = last.first + 1; s < to; ++s)
      reused_[static_cast<size_t>(s)] = s >= from && (s - from) % kEvery != 0;
    slow_until_ = two ? last.first : n / 2;
  }
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>&, Tensor) const override {
    const std::vector<Tensor> halves = split(step.predict(true), 2, 0);
    return {step.guide(halves[0], halves[1]), {halves[0] - halves[1]}};
  }
  Tensor reuse(const DenoisingStep& step, const std::vector<Tensor>& cached, Tensor factors) const override {
    const Tensor positive = step.predict(false), slow = low_frequencies(cached[0]);
    auto factor = [&](int64_t i) { return reshape(slice_axis(factors, 0, i, i + 1), {}); };
    auto times = [](Tensor x, Tensor y) { return x * broadcast_to(y, x.dims()); };
    return step.guide(positive + times(slow, factor(0)) + times(cached[0] - slow, factor(1)), positive);
  }
  bool reuses(const SamplingStage&, int64_t step, const std::function<double()>&) override {
    return reused_[static_cast<size_t>(step)];
  }
  std::vector<float> factors(const SamplingStage&, int64_t step) const override {
    constexpr float kMore = 1.2f;
    return step < slow_until_ ? std::vector<float>{kMore, 1} : std::vector<float>{1, kMore};
  }
  std::string name() const override { return "CFGCache"; }

 private:
  std::vector<bool> reused_;
  int64_t slow_until_;
};

/// Adds the blocks' last residual again while its norm is known to change little.
class MagCache final : public StepCache {
 public:
  MagCache(const StepCacheKeys& keys, const SamplingPlan& plan)
      : threshold_(keys.magcache_thresh), most_(keys.magcache_K), retention_(keys.retention_ratio), plan_(plan) {
    const std::vector<double>* base = &keys.mag_ratios_base;
    if (base->empty()) base = plan.height >= 720 ? &keys.mag_ratios_base_720p : &keys.mag_ratios_base_480p;
    if (base->empty()) base = &plan.magcache_ratios;
    if (base->empty())
      throw Error(Code::invalid_config,
                  "use_magcache is true; expected mag_ratios_base: no ratios were measured for this model")
          .note(
              "try: mag_ratios_base=[1, 1, …], for each step with prompt and without the mean size of what the "
              "blocks add divided by the value of the step before; or use_sen_cache=true, which needs none");
    check(base->size() % 2 == 0, Code::invalid_config,
          "mag_ratios_base has {} numbers; expected two for each step, with prompt and without", base->size());
    check(most_ >= 0 && retention_ >= 0 && retention_ <= 1, Code::invalid_config,
          "magcache_K is {} and retention_ratio is {}; expected 0 or more, and 0 to 1", most_, retention_);
    // If the ratios were measured for another number of steps, each step uses those of the nearest one.
    const size_t n = static_cast<size_t>(plan.steps()), measured = base->size() / 2;
    for (size_t s = 0; s < n; ++s) {
      const double at = n == 1 ? 0 : static_cast<double>(s * (measured - 1)) / static_cast<double>(n - 1);
      const size_t i = measured == n ? s : static_cast<size_t>(std::nearbyint(at));
      ratios_.push_back({(*base)[2 * i], (*base)[2 * i + 1]});
    }
  }
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>&, Tensor) const override {
    return computed_with(step, {.of = StepReuse::Of::blocks});
  }
  Tensor reuse(const DenoisingStep& step, const std::vector<Tensor>& cached, Tensor) const override {
    return computed_with(step, {.of = StepReuse::Of::blocks, .arrays = cached}).prediction;
  }
  void begin(const SamplingStage&) override { reset(); }
  bool reuses(const SamplingStage& stage, int64_t step, const std::function<double()>&) override {
    const int64_t since = step - stage.first;
    if (since == 0 || since < static_cast<int64_t>(static_cast<double>(stage.steps) * retention_)) return false;
    std::array<double, 2> ratio = ratio_, error = error_;
    for (size_t i = 0; i < (stage.guidance > 1 ? 2 : 1); ++i) {
      ratio[i] *= ratios_[static_cast<size_t>(step)][i];
      error[i] += std::abs(1 - ratio[i]);
    }
    if (count_ >= most_ || error[0] >= threshold_ || error[1] >= threshold_) {
      reset();
      return false;
    }
    ratio_ = ratio, error_ = error, ++count_;
    return true;
  }
  std::string name() const override { return "MagCache"; }
  std::string details() const override {
    return fmt::format(", high_noise_steps={}, thresh={}, K={}", plan_.stages.size() > 1 ? plan_.stages[0].steps : 0,
                       threshold_, most_);
  }

 private:
  void reset() { ratio_ = {1, 1}, error_ = {}, count_ = 0; }
  double threshold_;
  int64_t most_;
  double retention_;
  SamplingPlan plan_;
  std::vector<std::array<double, 2>> ratios_;
  std::array<double, 2> ratio_{1, 1}, error_{};
  int64_t count_ = 0;
};

/// Reuses the last prediction while sample and timestep have changed little.
class SenCache final : public StepCache {
 public:
  explicit SenCache(const SamplingPlan& plan) : plan_(plan) {}
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>&, Tensor) const override {
    const Tensor prediction = step.combine(step.predict(true));
    return {prediction, {prediction, step.sample}};
  }
  Tensor reuse(const DenoisingStep&, const std::vector<Tensor>& cached, Tensor) const override { return cached[0]; }
  Tensor moved(Tensor next, const std::vector<Tensor>& cached) const override {
    Axes all;
    for (int64_t i = 0; i < next.rank(); ++i) all.push_back(i);
    return sqrt(mean(square(next - cached[1]), all, false));
  }
  bool reuses(const SamplingStage& stage, int64_t step, const std::function<double()>& moved) override {
    constexpr double kTolerance = 0.1, kFirst = 0.3, kLast = 0.9;
    constexpr int64_t kMost = 3;
    const double n = static_cast<double>(plan_.steps()), time = plan_.times[static_cast<size_t>(step)];
    const bool computed =
        step == stage.first || step < static_cast<int64_t>(n * kFirst) || step >= static_cast<int64_t>(n * kLast);
    if (!computed) {
      score_ += moved() + std::abs(time - time_);
      if (score_ <= kTolerance && count_ < kMost) {
        ++count_;
        return true;
      }
    }
    score_ = 0, count_ = 0, time_ = time;
    return false;
  }
  std::string name() const override { return "SenCache"; }

 private:
  SamplingPlan plan_;
  double score_ = 0, time_ = 0;
  int64_t count_ = 0;
};

/// Reuses all blocks but the first while the first adds nearly the same to the tokens of all rows.
class FirstBlockCache final : public StepCache {
 public:
  explicit FirstBlockCache(double threshold) : threshold_(threshold) {}
  bool decides_on_device() const override { return true; }
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>& before, Tensor) const override {
    return computed_with(step, {.of = StepReuse::Of::other_blocks, .threshold = threshold_, .arrays = before});
  }
  Tensor reuse(const DenoisingStep&, const std::vector<Tensor>&, Tensor) const override { return {}; }
  bool reuses(const SamplingStage&, int64_t, const std::function<double()>&) override { return false; }
  std::string name() const override { return "FirstBlockCache"; }
  std::string details() const override { return fmt::format(", threshold={}", threshold_); }

 private:
  double threshold_;
};

/// Reuses all blocks until what the first one computes from has changed enough, by a polynomial fitted to the model.
class TeaCache final : public StepCache {
 public:
  TeaCache(const StepCacheKeys& keys, const SamplingPlan& plan)
      : threshold_(keys.teacache_thresh),
        coefficients_(keys.teacache_coefficients.empty() ? plan.teacache_coefficients : keys.teacache_coefficients) {
    if (coefficients_.empty())
      throw Error(Code::invalid_config,
                  "use_teacache is true; expected teacache_coefficients: none were fitted to this model")
          .note(
              "try: teacache_coefficients=[1, 0], which takes the change of the first block's input for the change of "
              "the "
              "result; or use_first_block_cache=true, which needs none");
  }
  bool decides_on_device() const override { return true; }
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>& before, Tensor factors) const override {
    return computed_with(step, {.of = StepReuse::Of::input_blocks,
                                .threshold = threshold_,
                                .coefficients = coefficients_,
                                .runs = reshape(slice_axis(factors, 0, 0, 1), {}),
                                .arrays = before});
  }
  Tensor reuse(const DenoisingStep&, const std::vector<Tensor>&, Tensor) const override { return {}; }
  bool reuses(const SamplingStage&, int64_t, const std::function<double()>&) override { return false; }
  /// 1: the blocks run.
  std::vector<float> factors(const SamplingStage& stage, int64_t step) const override {
    const bool first = step == stage.first, last = step + 1 == stage.first + stage.steps;
    return {first || last ? 1.0f : 0.0f, 0};
  }
  std::string name() const override { return "TeaCache"; }
  std::string details() const override { return fmt::format(", thresh={}", threshold_); }

 private:
  double threshold_;
  std::vector<double> coefficients_;
};

/// Computes the deep levels of a UNet in every `interval`-th step.
class DeepCache final : public StepCache {
 public:
  DeepCache(int64_t interval, int64_t branch) : interval_(interval), branch_(branch) {}
  CachedStep compute(const DenoisingStep& step, const std::vector<Tensor>&, Tensor) const override {
    return computed_with(step, {.of = StepReuse::Of::deep_levels, .branch = branch_});
  }
  Tensor reuse(const DenoisingStep& step, const std::vector<Tensor>& cached, Tensor) const override {
    return computed_with(step, {.of = StepReuse::Of::deep_levels, .branch = branch_, .arrays = cached}).prediction;
  }
  bool reuses(const SamplingStage& stage, int64_t step, const std::function<double()>&) override {
    return (step - stage.first) % interval_ != 0;
  }
  std::string name() const override { return "DeepCache"; }
  std::string details() const override { return fmt::format(", interval={}, branch={}", interval_, branch_); }

 private:
  int64_t interval_, branch_;
};

}  // namespace

Tensor low_frequencies(Tensor x) {
  const int64_t rows = x.rank() - 3, columns = x.rank() - 2, h = x.dim(rows), w = x.dim(columns);
  x = along(x, rows, low_pass(h, std::max<int64_t>(1, h / 4)));
  return along(x, columns, low_pass(w, std::max<int64_t>(1, (w / 2 + 1) / 4)));
}

void check_step_cache(const StepCacheKeys& keys, const FamilySpec& spec, bool controls) {
  check(!(keys.use_magcache || keys.use_first_block_cache || keys.use_teacache) || !spec.blocks.empty(),
        Code::invalid_config, "{} is true; expected false: this model is no sequence of blocks", keys.step_cache());
  if (!keys.use_deepcache) return;
  check(spec.up_layers > 1, Code::invalid_config, "use_deepcache is true; expected false: this model is no UNet");
  check(keys.deepcache_branch + 1 < spec.up_layers, Code::invalid_config,
        "deepcache_branch is {}; expected 0 to {}: this UNet has {} skip connections", keys.deepcache_branch,
        spec.up_layers - 2, spec.up_layers);
  check(!controls, Code::invalid_config,
        "use_deepcache is true; expected false with a ControlNet, which changes the deep levels in each step");
}

std::unique_ptr<StepCache> make_step_cache(const StepCacheKeys& keys, const SamplingPlan& plan) {
  for (const SamplingStage& s : plan.stages)
    check(!keys.use_cfg_cache || s.guidance > 1, Code::invalid_config,
          "use_cfg_cache needs guidance in every step, but the scale of {} is {}", s.denoiser, s.guidance);
  if (keys.use_cfg_cache) return std::make_unique<CfgCache>(plan);
  if (keys.use_magcache) return std::make_unique<MagCache>(keys, plan);
  if (keys.use_sen_cache) return std::make_unique<SenCache>(plan);
  if (keys.use_first_block_cache) return std::make_unique<FirstBlockCache>(keys.first_block_cache_threshold);
  if (keys.use_teacache) return std::make_unique<TeaCache>(keys, plan);
  if (keys.use_deepcache) return std::make_unique<DeepCache>(keys.deepcache_interval, keys.deepcache_branch);
  return nullptr;
}

}  // namespace md
