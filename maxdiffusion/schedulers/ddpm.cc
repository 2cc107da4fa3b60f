// Ancestral sampling of denoising diffusion probabilistic models: the posterior of x_{t'} given x_t and x0, where t' is
// the next timestep of the schedule (not t − 1), so that fewer steps than T are sampled rightly too.
// Source: Ho et al. 2020, equations 6–7; Nichol and Dhariwal 2021 for strided schedules.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/spacing.h"
#include "maxdiffusion/schedulers/table.h"

namespace md {
namespace {

class Ddpm final : public Scheduler {
 public:
  explicit Ddpm(const nlohmann::json& config)
      : noise_(NoiseSchedule::from_json(config)),
        spacing_(choice(config, "timestep_spacing", "leading", {"linspace", "leading", "trailing"})),
        variance_(choice(config, "variance_type", "fixed_small",
                         {"fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"})),
        offset_(member<int64_t>(config, "steps_offset", 0)),
        clip_(member(config, "clip_sample", true) ? member(config, "clip_sample_range", 1.0) : 0) {
    require_off(config, {"thresholding"});
  }

  std::string name() const override { return "DDPMScheduler"; }

  SampleTable table(int64_t steps) const override {
    SampleTable table;
    table.timesteps = spaced_timesteps(spacing_, steps, noise_.num_train_timesteps, offset_);
    for (double& t : table.timesteps) t = std::nearbyint(t);
    std::vector<std::vector<double>> rows;
    for (size_t i = 0; i < table.timesteps.size(); ++i) {
      const bool last = i + 1 == table.timesteps.size();
      const double a = noise_.alphas_cumprod[static_cast<size_t>(table.timesteps[i])];
      const double b = last ? 1.0 : noise_.alphas_cumprod[static_cast<size_t>(table.timesteps[i + 1])];
      const double alpha = a / b, beta = 1 - alpha;  // of the whole jump
      const auto x0 = to_x0(noise_.prediction_type, a);
      const double variance = variance_.starts_with("fixed_small") ? std::max(1e-20, (1 - b) / (1 - a) * beta) : beta;
      rows.push_back({x0.sample, x0.output, std::sqrt(b) * beta / (1 - a), std::sqrt(alpha) * (1 - b) / (1 - a),
                      last ? 0.0 : std::sqrt(variance)});
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
    Tensor next = x0 * at(2) + x * at(3) + random_normal(noise, x.shape()) * at(4);
    return {cast(next, sample.dtype())};
  }

 private:
  NoiseSchedule noise_;
  std::string spacing_, variance_;
  int64_t offset_;
  double clip_;
};

}  // namespace

std::unique_ptr<Scheduler> make_ddpm(const nlohmann::json& config) { return std::make_unique<Ddpm>(config); }

}  // namespace md
