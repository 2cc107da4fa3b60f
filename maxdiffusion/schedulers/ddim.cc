// Denoising diffusion implicit models: jump to x0, then back to the previous timestep along the predicted noise.
// Source: Song et al. 2021, equations 12 and 16.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/spacing.h"
#include "maxdiffusion/schedulers/table.h"

namespace md {
namespace {

class Ddim final : public Scheduler {
 public:
  explicit Ddim(const nlohmann::json& config)
      : noise_(NoiseSchedule::from_json(config)),
        spacing_(choice(config, "timestep_spacing", "leading", {"linspace", "leading", "trailing"})),
        offset_(member<int64_t>(config, "steps_offset", 0)),
        alpha_to_one_(member(config, "set_alpha_to_one", true)),
        clip_(member(config, "clip_sample", false) ? member(config, "clip_sample_range", 1.0) : 0),
        eta_(member(config, "eta", 0.0)) {
    require_off(config, {"thresholding"});
    check(eta_ >= 0, Code::invalid_config, "scheduler config: eta is {}; expected 0 or more", eta_);
  }

  std::string name() const override { return "DDIMScheduler"; }

  SampleTable table(int64_t steps) const override {
    const int64_t T = noise_.num_train_timesteps;
    SampleTable table;
    table.timesteps = spaced_timesteps(spacing_, steps, T, offset_);
    std::vector<std::vector<double>> rows;
    for (double& t : table.timesteps) {
      t = std::nearbyint(t);  // linspace: this sampler's tables are by whole timesteps
      const int64_t previous = static_cast<int64_t>(t) - T / steps;
      const double a = noise_.alphas_cumprod[static_cast<size_t>(t)];
      const double b = previous >= 0   ? noise_.alphas_cumprod[static_cast<size_t>(previous)]
                       : alpha_to_one_ ? 1.0
                                       : noise_.alphas_cumprod[0];
      const auto x0 = to_x0(noise_.prediction_type, a);
      // ε = (x − √ᾱ·x0)/√(1−ᾱ), except where the model says it.
      Combination eps{0, 1};
      if (noise_.prediction_type != "epsilon")
        eps = {(1 - std::sqrt(a) * x0.sample) / std::sqrt(1 - a), -std::sqrt(a) * x0.output / std::sqrt(1 - a)};
      const double variance = std::max(0.0, (1 - b) / (1 - a) * (1 - a / b));
      const double spread = eta_ * std::sqrt(variance);
      rows.push_back({x0.sample, x0.output, eps.sample, eps.output, std::sqrt(b),
                      std::sqrt(std::max(0.0, 1 - b - spread * spread)), spread});
    }
    table.rows = rows_of(rows);
    return table;
  }

  Tensor scale_input(Tensor sample, Tensor) const override { return sample; }

  std::vector<Tensor> step(Tensor output, Tensor sample, Tensor row, const std::vector<Tensor>&,
                           Rng noise) const override {
    Tensor out = cast(output, DType::f32), x = cast(sample, DType::f32);
    auto at = [&](int64_t i) { return column(row, i); };
    Tensor x0 = x * at(0) + out * at(1);
    if (clip_ > 0) x0 = clamp(x0, -clip_, clip_);
    Tensor eps = x * at(2) + out * at(3);
    Tensor next = x0 * at(4) + eps * at(5);
    if (eta_ > 0) next = next + random_normal(noise, x.shape()) * at(6);
    return {cast(next, sample.dtype())};
  }

 private:
  NoiseSchedule noise_;
  std::string spacing_;
  int64_t offset_;
  bool alpha_to_one_;
  double clip_, eta_;
};

}  // namespace

std::unique_ptr<Scheduler> make_ddim(const nlohmann::json& config) { return std::make_unique<Ddim>(config); }

}  // namespace md
