// Straight paths from data to noise: x = (1 − σ)·x0 + σ·ε, and the model predicts ε − x0. Times are continuous.
// Sources: Lipman et al. 2023; Liu et al. 2022 (rectified flow); Esser et al. 2024 (shifted times). The weights are
// those of MaxDiffusion's flow-match scheduler, whose table is made over the grid of its 1000 shifted times.
#include <algorithm>
#include <cmath>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"

namespace md {
namespace {

constexpr double kSigmaMax = 1, kSigmaMin = 0.003 / 1.002;

/// Sigma at timestep 0. Samplers map σ to the timestep T·σ; MaxDiffusion's training has a separate sigma at timestep 0.
double least_level(const std::string& lookup) {
  check(lookup == "exact" || lookup == "reference_table", Code::invalid_config,
        "timestep_lookup is '{}'; expected one of: exact, reference_table", lookup);
  return lookup == "exact" ? 0 : kSigmaMin;
}

class FlowMatch final : public NoiseProcess {
 public:
  FlowMatch(const nlohmann::json& config, const ProcessKeys& keys)
      : T_(field<int64_t>(config, "num_train_timesteps", 1000)),
        shift_(keys.train_flow_shift),
        least_(least_level(keys.timestep_lookup)),
        weighted_(!keys.disable_training_weights && T_ > 1) {
    check(T_ >= 1 && T_ <= 1'000'000, Code::invalid_config,
          "scheduler config: num_train_timesteps is {}; expected 1 or more, up to a million", T_);
    check(std::isfinite(shift_) && shift_ > 0, Code::invalid_config,
          "train_flow_shift is {}; expected a number above 0", shift_);
    check(keys.snr_gamma <= 0, Code::invalid_config,
          "snr_gamma is {}, but flow matching has its own loss weights; try: snr_gamma=-1", keys.snr_gamma);
    check(TimestepBias::from_map(keys.timestep_bias).strategy == "none", Code::invalid_config,
          "timestep_bias is set, but flow matching does not support it; try: train_flow_shift");
    make_table();
  }
  int64_t num_train_timesteps() const override { return T_; }
  DType timestep_dtype() const override { return DType::f32; }

  Tensor sample_timesteps(Rng rng, int64_t batch) const override {
    Tensor u = random_uniform(rng, {DType::f32, {batch}});
    if (first_ > 0 || last_ < 1) u = u * (last_ - first_) + first_;
    return (u * shift_) / (u * (shift_ - 1) + 1.0) * static_cast<double>(T_);
  }
  Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const override {
    const Tensor s = sigma(t, x0.rank());
    return x0 * (1.0 - s) + noise * s;
  }
  Tensor target(Tensor x0, Tensor noise, Tensor) const override { return noise - x0; }
  Tensor weight(Tensor t) const override {
    if (!weighted_) return {};
    // The nearest timestep of the grid: the number of midpoints above t.
    const int64_t n = static_cast<int64_t>(weights_.size());
    Tensor middles = constant(t.graph(), HostArray::of<float>({DType::f32, {1, n - 1}}, middles_));
    Tensor index = sum(cast(lt(reshape(t, {t.dim(0), 1}), middles), DType::s32), {1});
    return take(constant(t.graph(), HostArray::of<float>({DType::f32, {n}}, weights_)), index);
  }
  HostArray timesteps_from_sigmas(const HostArray& sigmas) const override {
    HostArray out = sigmas.cast(DType::f32);
    HostArray times(out.shape());
    std::ranges::transform(out.view<float>(), times.mutable_view<float>().begin(), [this](float s) {
      return static_cast<float>((s - least_) / (kSigmaMax - least_) * static_cast<double>(T_));
    });
    return times;
  }
  std::shared_ptr<const NoiseProcess> restricted_to(double from, double to) const override {
    auto part = std::make_shared<FlowMatch>(*this);
    auto unshifted = [this](double t) {
      const double tau = t / static_cast<double>(T_);
      return tau / (shift_ - (shift_ - 1) * tau);
    };
    part->first_ = unshifted(from), part->last_ = unshifted(to);
    part->from_ = from, part->to_ = to;
    return part;
  }
  double probability() const override { return last_ - first_; }
  bool contains(double t) const override { return (first_ == 0 || t >= from_) && (last_ == 1 || t < to_); }
  std::shared_ptr<const NoiseProcess> unweighted() const override {
    auto plain = std::make_shared<FlowMatch>(*this);
    plain->weighted_ = false;
    return plain;
  }

 private:
  Tensor sigma(Tensor t, int64_t rank) const {
    Dims dims(static_cast<size_t>(rank), 1);
    dims[0] = t.dim(0);
    return reshape(t * ((kSigmaMax - least_) / static_cast<double>(T_)) + least_, dims);
  }
  /// The middles between the falling times of the grid, and the bell of weights, whose mean is 1 and minimum 0.
  void make_table() {
    const size_t n = static_cast<size_t>(T_);
    double total = 0, least = HUGE_VAL;
    std::vector<double> grid, bell;
    for (size_t i = 0; i < n; ++i) {
      const double part = n == 1 ? 0 : static_cast<double>(i) / static_cast<double>(n - 1);
      const double u = kSigmaMax + (kSigmaMin - kSigmaMax) * part;
      grid.push_back(shift_ * u / (1 + (shift_ - 1) * u) * static_cast<double>(T_));
      const double x = (grid.back() - static_cast<double>(T_) / 2) / static_cast<double>(T_);
      bell.push_back(std::exp(-2 * x * x));
      least = std::min(least, bell.back());
    }
    for (double& y : bell) total += y -= least;
    for (size_t i = 0; i < n; ++i) {
      weights_.push_back(static_cast<float>(total > 0 ? bell[i] * static_cast<double>(n) / total : 1.0));
      if (i + 1 < n) middles_.push_back(static_cast<float>((grid[i] + grid[i + 1]) / 2));
    }
  }

  int64_t T_;
  double shift_, least_;
  double first_ = 0, last_ = 1;  // range of the uniform numbers before the shift
  double from_ = 0, to_ = 0;     // the times that they become, where not all
  bool weighted_;
  std::vector<float> middles_, weights_;
};

}  // namespace

bool is_flow_matching(const nlohmann::json& config) {
  const SamplerClass* sampler = find_sampler(field<std::string>(config, "_class_name", ""));
  const bool only_flow = sampler && sampler->models == SamplerClass::flow;
  return field<std::string>(config, "prediction_type", only_flow ? "flow_prediction" : "epsilon") == "flow_prediction";
}

std::shared_ptr<const NoiseProcess> make_flow_match(const nlohmann::json& config, const ProcessKeys& keys) {
  return is_flow_matching(config) ? std::make_shared<FlowMatch>(config, keys) : nullptr;
}

}  // namespace md
