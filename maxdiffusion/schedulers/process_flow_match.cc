// Straight paths from data to noise: x = (1 − σ)·x0 + σ·ε, and the model predicts ε − x0. Times are continuous.
// Sources: Lipman et al. 2023; Liu et al. 2022 (rectified flow); Esser et al. 2024 (shifted times, their distributions
// and weights; diffusers' scripts, whose logit-normal times are 1 less those of the paper). The weights by default are
// those of MaxDiffusion's flow-match scheduler, whose table is made over the grid of its 1000 shifted times.
#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <set>
#include <tuple>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/gather.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/timestep_sampling.h"

namespace md {
namespace {

constexpr double kSigmaMax = 1, kSigmaMin = 0.003 / 1.002;

/// Sigma at timestep 0. Samplers map σ to the timestep T·σ; MaxDiffusion's training uses a larger sigma at timestep 0.
double least_level(const std::string& lookup) {
  check(lookup == "exact" || lookup == "reference_table", Code::invalid_config,
        "timestep_lookup is '{}'; expected one of: exact, reference_table", lookup);
  return lookup == "exact" ? 0 : kSigmaMin;
}

/// A distribution of times in [0, 1], 1 being noise.
struct Density {
  enum class Kind { uniform, logit_normal, mode, cosmap };
  Kind kind = Kind::uniform;
  double mean = 0, deviation = 1;  // of the logit
  double scale = 0;                // of mode

  static Density of(const ProcessKeys& k) {
    const std::string& name = k.timestep_sampling;
    if (name == "uniform") return {};
    if (name == "mode") {
      check(k.mode_scale >= -1 && k.mode_scale <= 1.75, Code::invalid_config,
            "mode_scale is {}; expected -1 to 1.75, where times rise with the uniform number", k.mode_scale);
      return {.kind = Kind::mode, .scale = k.mode_scale};
    }
    if (name == "cosmap") return {.kind = Kind::cosmap};
    const bool logit = name == "logit_normal";
    check(logit || name == "sigmoid" || name == "shift" || name == "flux_shift", Code::invalid_config,
          "timestep_sampling is '{}'; expected one of: uniform, logit_normal, mode, cosmap, sigmoid, shift, flux_shift",
          name);
    const double deviation = logit ? k.logit_std : k.sigmoid_scale;
    check(std::isfinite(deviation) && deviation > 0, Code::invalid_config, "{} is {}; expected a number above 0",
          logit ? "logit_std" : "sigmoid_scale", deviation);
    return {.kind = Kind::logit_normal, .mean = logit ? -k.logit_mean : 0, .deviation = deviation};
  }

  /// Times of the part of the distribution between the quantiles `first` and `last`.
  Tensor sample(Rng rng, int64_t batch, double first, double last) const {
    const bool whole = first <= 0 && last >= 1;
    if (kind == Kind::logit_normal && whole)
      return sigmoid(random_normal(rng, {DType::f32, {batch}}) * deviation + mean);
    Tensor u = random_uniform(rng, {DType::f32, {batch}});
    if (!whole) u = u * (last - first) + first;
    if (kind == Kind::uniform) return u;
    const Tensor angle = u * (std::numbers::pi / 2);
    if (kind == Kind::cosmap) return sin(angle) / (sin(angle) + cos(angle));
    if (kind == Kind::mode) return u + (square(cos(angle)) - 1.0 + u) * scale;
    return sigmoid(erf_inv(u * 2.0 - 1.0) * (std::numbers::sqrt2 * deviation) + mean);
  }
  /// The probability of times below `time`.
  double below(double time) const {
    if (time <= 0 || time >= 1 || kind == Kind::uniform) return time;
    if (kind == Kind::cosmap) return std::atan2(time, 1 - time) * 2 / std::numbers::pi;
    if (kind == Kind::logit_normal)
      return std::erfc(-(std::log(time / (1 - time)) - mean) / deviation / std::numbers::sqrt2) / 2;
    double low = 0, high = 1;
    for (int i = 0; i < 60; ++i) {
      const double u = (low + high) / 2, c = std::cos(u * std::numbers::pi / 2);
      (u + scale * (c * c - 1 + u) < time ? low : high) = u;
    }
    return low;
  }
};

class FlowMatch final : public NoiseProcess {
 public:
  FlowMatch(const nlohmann::json& config, const ProcessKeys& keys)
      : T_(field<int64_t>(config, "num_train_timesteps", 1000)),
        shift_(keys.train_flow_shift),
        least_(least_level(keys.timestep_lookup)),
        density_(Density::of(keys)),
        weights_by_(keys.disable_training_weights ? "none" : keys.weighting_scheme) {
    check(T_ >= 1 && T_ <= 1'000'000, Code::invalid_config,
          "scheduler config: num_train_timesteps is {}; expected 1 or more, up to a million", T_);
    check(std::isfinite(shift_) && shift_ > 0, Code::invalid_config,
          "train_flow_shift is {}; expected a number above 0", shift_);
    check(weights_by_ == "bell" || weights_by_ == "none" || weights_by_ == "sigma_sqrt" || weights_by_ == "cosmap",
          Code::invalid_config, "weighting_scheme is '{}'; expected one of: bell, none, sigma_sqrt, cosmap",
          weights_by_);
    check(!keys.disable_training_weights || keys.weighting_scheme == "bell" || keys.weighting_scheme == "none",
          Code::invalid_config, "weighting_scheme is '{}', and disable_training_weights says that there are no weights",
          keys.weighting_scheme);
    for (const auto& [key, on] : {std::pair{"debiased_estimation_loss", keys.debiased_estimation_loss},
                                  {"scale_v_pred_loss_like_noise_pred", keys.scale_v_pred_loss_like_noise_pred}})
      check(!on, Code::invalid_config, "{} is true, but flow matching has its own loss weights; try: weighting_scheme",
            key);
    if (T_ == 1 && weights_by_ == "bell") weights_by_ = "none";
    if (keys.timestep_sampling == "sigmoid") shift_ = 1;
    if (keys.timestep_sampling == "flux_shift") {
      shift_ = 1;  // until the tokens are known
      by_tokens_ = {field(config, "base_image_seq_len", 256.0), field(config, "max_image_seq_len", 4096.0),
                    field(config, "base_shift", 0.5), field(config, "max_shift", 1.15)};
      check(by_tokens_[0] < by_tokens_[1], Code::invalid_config,
            "scheduler config: base_image_seq_len is {}, max_image_seq_len {}; expected more", by_tokens_[0],
            by_tokens_[1]);
    }
    check(keys.snr_gamma <= 0, Code::invalid_config,
          "snr_gamma is {}, but flow matching has its own loss weights; try: snr_gamma=-1", keys.snr_gamma);
    check(TimestepBias::from_map(keys.timestep_bias).strategy == "none", Code::invalid_config,
          "timestep_bias is set, but flow matching does not support it; try: train_flow_shift");
    make_table();
    if (const auto [least, most] = timestep_range(keys, T_); least > 0 || most < T_) {
      from_ = static_cast<double>(least), to_ = static_cast<double>(most);
      find_quantiles();
    }
  }
  int64_t num_train_timesteps() const override { return T_; }
  DType timestep_dtype() const override { return DType::f32; }

  Tensor sample_timesteps(Rng rng, int64_t batch) const override {
    const Tensor u = density_.sample(rng, batch, first_, last_);
    return (u * shift_) / (u * (shift_ - 1) + 1.0) * static_cast<double>(T_);
  }
  Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const override {
    const Tensor s = sigma(t, x0.rank());
    return x0 * (1.0 - s) + noise * s;
  }
  Tensor target(Tensor x0, Tensor noise, Tensor) const override { return noise - x0; }
  Tensor weight(Tensor t) const override {
    if (weights_by_ == "none") return {};
    if (weights_by_ != "bell") {
      const Tensor s = sigma(t, 1);
      if (weights_by_ == "cosmap") return 2.0 / ((1.0 - s * 2.0 + square(s) * 2.0) * std::numbers::pi);
      // Below the least level of the grid weights stay as they are there.
      const double least = shift_ / (static_cast<double>(T_) + shift_ - 1);
      return 1.0 / square(maximum(s, full_like(s, least)));
    }
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
    part->from_ = std::max(from, from_), part->to_ = to_ > from_ ? std::min(to, to_) : to;
    check(part->from_ < part->to_, Code::invalid_config,
          "min_timestep is {} and max_timestep {}; expected timesteps of this expert, which is for {} to {}", from_,
          to_, from, to);
    part->find_quantiles();
    return part;
  }
  std::shared_ptr<const NoiseProcess> for_tokens(int64_t tokens) const override {
    if (by_tokens_.empty()) return {};
    auto sized = std::make_shared<FlowMatch>(*this);
    const auto& [least, most, low, high] = std::tie(by_tokens_[0], by_tokens_[1], by_tokens_[2], by_tokens_[3]);
    sized->shift_ = std::exp(low + (high - low) * (static_cast<double>(tokens) - least) / (most - least));
    sized->make_table();
    if (to_ > from_) sized->find_quantiles();
    return sized;
  }
  double probability() const override { return last_ - first_; }
  bool contains(double t) const override { return (first_ == 0 || t >= from_) && (last_ == 1 || t < to_); }
  std::shared_ptr<const NoiseProcess> unweighted() const override {
    auto plain = std::make_shared<FlowMatch>(*this);
    plain->weights_by_ = "none";
    return plain;
  }

 private:
  /// The quantiles of from_ and to_.
  void find_quantiles() {
    auto quantile = [this](double t) {
      const double tau = t / static_cast<double>(T_);
      return density_.below(tau / (shift_ - (shift_ - 1) * tau));
    };
    first_ = quantile(from_), last_ = quantile(to_);
  }
  Tensor sigma(Tensor t, int64_t rank) const {
    Dims dims(static_cast<size_t>(rank), 1);
    dims[0] = t.dim(0);
    return reshape(t * ((kSigmaMax - least_) / static_cast<double>(T_)) + least_, dims);
  }
  /// Computes the midpoints of the descending grid of timesteps, and the bell-shaped weights with mean 1 and minimum 0.
  void make_table() {
    weights_.clear(), middles_.clear();
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
  double first_ = 0, last_ = 1;  // the quantiles that are sampled
  double from_ = 0, to_ = 0;     // the times that they become, where not all
  Density density_;
  std::string weights_by_;
  std::vector<double> by_tokens_;  // tokens and the shift's logarithm there, twice; empty: it is the same for all
  std::vector<float> middles_, weights_;
};

}  // namespace

bool timestep_sampling_reads(const std::string& sampling, std::string_view key) {
  static const std::map<std::string, std::set<std::string, std::less<>>> keys = {
      {"uniform", {"train_flow_shift"}},
      {"logit_normal", {"logit_mean", "logit_std", "train_flow_shift"}},
      {"mode", {"mode_scale", "train_flow_shift"}},
      {"cosmap", {"train_flow_shift"}},
      {"sigmoid", {"sigmoid_scale"}},
      {"shift", {"sigmoid_scale", "train_flow_shift"}},
      {"flux_shift", {"sigmoid_scale"}}};
  const auto found = keys.find(sampling);
  return found != keys.end() && found->second.contains(key);
}

bool is_flow_matching(const nlohmann::json& config) {
  const SamplerClass* sampler = find_sampler(field<std::string>(config, "_class_name", ""));
  const bool only_flow = sampler && sampler->models == SamplerClass::flow;
  return field<std::string>(config, "prediction_type", only_flow ? "flow_prediction" : "epsilon") == "flow_prediction";
}

std::shared_ptr<const NoiseProcess> make_flow_match(const nlohmann::json& config, const ProcessKeys& keys) {
  return is_flow_matching(config) ? std::make_shared<FlowMatch>(config, keys) : nullptr;
}

}  // namespace md
