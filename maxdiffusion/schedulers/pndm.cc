// Pseudo numerical methods for diffusion models: the transfer function of the probability-flow ODE, applied to a linear
// multistep mean of the model's last outputs. The first outputs are from pseudo Runge-Kutta steps with four calls each
// or, with skip_prk_steps, from calling the model twice at the second timestep.
// Source: Liu et al. 2022, equations 11–13 and algorithm 2.

#include <algorithm>
#include <cmath>

#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/linear.h"
#include "maxdiffusion/schedulers/sampler_class.h"
#include "maxdiffusion/schedulers/spacing.h"

namespace md {
namespace {

constexpr const char* kPndm = "PNDMScheduler";

constexpr size_t kPrkCalls = 12;  // three steps of four

std::vector<double> visited(const std::vector<double>& spaced, bool skip_prk, double half) {
  std::vector<double> t = spaced;
  if (skip_prk) {
    if (t.size() > 1) t.insert(t.begin() + 1, t[1]);
    return t;
  }
  for (size_t i = 3; i > 0; --i) t.insert(t.begin() + static_cast<int64_t>(i), {t[i] + half, t[i] + half, t[i]});
  return t;
}

std::unique_ptr<Scheduler> make_pndm(const nlohmann::json& config) {
  require_no_sigma_schedule(config);
  choice(config, "prediction_type", "epsilon", {"epsilon", "v_prediction"});
  const auto noise = NoiseSchedule::from_json(config);
  const auto spacing = choice(config, "timestep_spacing", "leading", {"linspace", "leading", "trailing"});
  const auto offset = field<int64_t>(config, "steps_offset", 0);
  const bool skip_prk = field(config, "skip_prk_steps", false);
  const double after_last = field(config, "set_alpha_to_one", false) ? 1.0 : noise.alphas_cumprod[0];

  auto abar = [=](double t) {
    const auto i = static_cast<size_t>(std::min(t, static_cast<double>(noise.num_train_timesteps - 1)));
    return t < 0 ? after_last : divisible(noise.alphas_cumprod[i]);
  };
  auto transfer = [=](const Form& x, double from, double to, const Form& output) -> Form {
    const double a = abar(from), b = abar(to);
    const Form epsilon = predicted_noise(noise.prediction_type, std::sqrt(a), std::sqrt(1 - a),
                                         {.sample = x, .output = output, .clipped = {}, .history = {}});
    return std::sqrt(b / a) * x - (b - a) / (a * std::sqrt(1 - b) + std::sqrt(a * (1 - a) * b)) * epsilon;
  };

  auto plan = [=](int64_t steps, const Knowns& k) {
    const int64_t T = noise.num_train_timesteps;
    LinearPlan p{.timesteps = integer_timesteps(spacing, steps, T, offset), .steps = {}};
    check(skip_prk || steps >= 4, Code::invalid_config,
          "num_inference_steps is {}; PNDMScheduler expects 4 or more without skip_prk_steps", steps);
    check(skip_prk || k.first == 0, Code::invalid_config,
          "strength leaves out {}; PNDMScheduler expects skip_prk_steps=true to begin after its first step: "
          "scheduler=pndm",
          k.first == 1 ? "a step" : "steps");
    const int64_t whole = T / steps, middle = whole / 2;
    const auto stride = static_cast<double>(whole), half = static_cast<double>(middle);
    p.timesteps = visited(p.timesteps, skip_prk, half);
    for (size_t row = 0; row < p.timesteps.size(); ++row) {
      const double t = p.timesteps[row];
      // Calls are counted from the first that runs, whose timestep is then not repeated, as in diffusers.
      const size_t i = k.before(row);
      // Carried: the sample at the start of a step, the last three outputs, the mean of a Runge-Kutta step.
      Form start = k.history[0], mean = k.history.back();
      std::vector<Form> outputs = {k.output, k.history[1], k.history[2], k.history[3]};  // newest first
      Form next;
      if (!skip_prk && i < kPrkCalls) {
        const size_t call = i % 4;
        if (call == 0) start = k.sample, mean = 0 * k.output;
        mean += (call == 0 || call == 3 ? 1.0 / 6 : 1.0 / 3) * k.output;
        next = transfer(start, p.timesteps[i - call], call % 2 ? t : t - half, call == 3 ? mean : k.output);
        if (call != 0) outputs.erase(outputs.begin());
      } else if (skip_prk && i == 1) {
        next = transfer(start, t + stride, t, (k.output + outputs[1]) / 2.0);
        outputs.erase(outputs.begin());
      } else {
        const size_t known = skip_prk ? std::min<size_t>(std::max<size_t>(i, 1), 4) : 4;
        const auto& e = outputs;
        const Form slope = known == 1   ? e[0]
                           : known == 2 ? Form((3.0 * e[0] - e[1]) / 2.0)
                           : known == 3 ? Form((23.0 * e[0] - 16.0 * e[1] + 5.0 * e[2]) / 12.0)
                                        : Form((55.0 * e[0] - 59.0 * e[1] + 37.0 * e[2] - 9.0 * e[3]) / 24.0);
        if (i == 0) start = k.sample;
        next = transfer(k.sample, t, t - stride, slope);
      }
      LinearStep step{.level = level_of(abar(t)), .x0 = {}, .next = {next, start, outputs[0], outputs[1], outputs[2]}};
      if (!skip_prk) step.next.push_back(mean);
      p.steps.push_back(step);
    }
    return p;
  };
  return linear_sampler({.name = kPndm, .history = skip_prk ? 4 : 5, .plan = plan});
}

}  // namespace

SamplerClass pndm_sampler() {
  return {.name = kPndm,
          .make = make_pndm,
          .words = {{.word = "pndm", .fields = {{"skip_prk_steps", true}}, .aliases = {"plms"}}},
          .fields = {"set_alpha_to_one", "skip_prk_steps"}};
}

}  // namespace md
