// Euler's method on the probability-flow ODE in the variable σ = √((1−ᾱ)/ᾱ): x += (x − x0)/σ · (σ' − σ).
// Every prediction type makes that linear in x and the output, so a row holds the two coefficients.
// Source: Karras et al. 2022, algorithm 2 without churn.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/schedulers/members.h"
#include "maxdiffusion/schedulers/spacing.h"
#include "maxdiffusion/schedulers/table.h"

namespace md {
namespace {

class Euler final : public Scheduler {
 public:
  explicit Euler(const nlohmann::json& config)
      : noise_(NoiseSchedule::from_json(config)),
        spacing_(choice(config, "timestep_spacing", "linspace", {"linspace", "leading", "trailing"})),
        offset_(member<int64_t>(config, "steps_offset", 1)) {
    require_off(config, {"use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"});
    choice(config, "interpolation_type", "linear", {"linear"});
    choice(config, "final_sigmas_type", "zero", {"zero"});
  }

  std::string name() const override { return "EulerDiscreteScheduler"; }

  SampleTable table(int64_t steps) const override {
    SampleTable table;
    table.timesteps = spaced_timesteps(spacing_, steps, noise_.num_train_timesteps, offset_);
    std::vector<double> sigmas;
    for (double t : table.timesteps) sigmas.push_back(sigma(t));
    sigmas.push_back(0);
    std::vector<std::vector<double>> rows;
    for (size_t i = 0; i + 1 < sigmas.size(); ++i) {
      const double s = sigmas[i], ds = sigmas[i + 1] - s, scale = 1 / std::sqrt(s * s + 1);
      double of_sample = 1, of_output = ds;  // epsilon
      if (noise_.prediction_type == "v_prediction") {
        of_sample = 1 + ds * s * scale * scale;
        of_output = ds * scale;
      } else if (noise_.prediction_type == "sample") {
        of_sample = 1 + ds / s;
        of_output = -ds / s;
      }
      rows.push_back({scale, of_sample, of_output});
    }
    table.rows = rows_of(rows);
    const double top = *std::max_element(sigmas.begin(), sigmas.end());
    table.init_noise_sigma = spacing_ == "leading" ? std::sqrt(top * top + 1) : top;
    return table;
  }

  Tensor scale_input(Tensor sample, Tensor row) const override { return sample * cast(column(row, 0), sample.dtype()); }

  std::vector<Tensor> step(Tensor output, Tensor sample, Tensor row, const std::vector<Tensor>&, Rng) const override {
    const DType type = sample.dtype();
    return {sample * cast(column(row, 1), type) + cast(output, type) * cast(column(row, 2), type)};
  }

 private:
  /// Linear between whole timesteps.
  double sigma(double t) const {
    auto whole = [&](size_t i) {
      const double a = std::max(noise_.alphas_cumprod[i], kTinyAlphaBar);
      return std::sqrt((1 - a) / a);
    };
    const auto below = static_cast<size_t>(std::floor(t));
    const double part = t - std::floor(t);
    return part == 0 ? whole(below) : whole(below) * (1 - part) + whole(below + 1) * part;
  }

  NoiseSchedule noise_;
  std::string spacing_;
  int64_t offset_;
};

}  // namespace

std::unique_ptr<Scheduler> make_euler(const nlohmann::json& config) { return std::make_unique<Euler>(config); }

}  // namespace md
