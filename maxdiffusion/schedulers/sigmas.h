// Noise levels σ of samplers: those of training, at spaced timesteps, or respaced (sigma_schedule).
// Sources: Karras et al. 2022, equation 5 (karras); Lu et al. 2022 (lu: uniform log SNR); Lee et al. 2024 (beta);
// Sabour et al. 2024 (kl_optimal); ComfyUI (simple, sgm_uniform); Esser et al. 2024, equation 23 (shifted flow
// σ).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>

#include "maxdiffusion/schedulers/linear.h"

namespace md {

struct SigmaLevels {
  std::vector<double> timesteps;
  std::vector<double> sigmas;  // one per timestep, then the final σ
};

/// Fields of scheduler_config.json. The sample is α·x0 + σ'·ε: without flow σ = σ'/α and α² + σ'² = 1, with flow σ = σ'
/// and α = 1 − σ.
struct SigmaGrid {
  NoiseSchedule noise;
  std::string spacing, kind;  // kind: training, lu, or of sigma_schedules()
  int64_t offset = 0;
  std::optional<double> sigma_min, sigma_max;  // ends of respaced sigmas; default: those of training
  bool ends_at_zero = true, flow = false;
  double flow_shift = 1;
  std::optional<double> shift_terminal;
  // Set by samplers, not by fields of the file.
  bool log_linear = false;    // Euler: training sigmas, evenly spaced in log σ
  int64_t end = 0;            // DPM-Solver: see multistep_timesteps; from_json: T
  bool cut_karras = false;    // DPM-Solver: timesteps of Karras sigmas are truncated, not rounded
  bool whole_karras = false;  // DPM2: spaced() rounds timesteps of Karras sigmas
  bool flow_from_one = true;  // DPM-Solver: false: flow sigmas go from 1 − 1/T to 0, not from 1 to 1/T

  /// Throws invalid_config; refuses flow_prediction without flow σ.
  static SigmaGrid from_json(const nlohmann::json& config);
  /// Drops the last training timesteps, whose half log SNR is below `lambda_min_clipped`. Throws invalid_config if that
  /// drops all.
  void clip_lambda(const nlohmann::json& config);

  /// For Euler and LMS: timesteps are fractional, respaced levels are between those at the spaced timesteps.
  SigmaLevels spaced(int64_t steps) const;
  /// For DPM-Solver and UniPC: timesteps are whole, respaced levels are between those of training.
  SigmaLevels multistep(int64_t steps) const;
  /// √((1−ᾱ)/ᾱ) of training, linear between whole timesteps.
  double training_sigma(double t) const;
  /// The timestep of a level: linear in log σ between those of training.
  double timestep_of(double sigma) const;

 private:
  double log_linear_sigma(double t) const;
  std::vector<double> respaced(double top, double bottom, int64_t n) const;
  std::vector<double> flow_levels(int64_t steps) const;
};

/// Levels of samplers for x0 + σ·ε whose last step ends without noise. Throws invalid_config as SigmaGrid::from_json,
/// and for flow σ, levels of Lu et al. and another final level.
SigmaGrid grid_to_zero(const nlohmann::json& config);

/// Values of the key and the field sigma_schedule other than training: karras, exponential, beta, kl_optimal, simple,
/// sgm_uniform, and those of published_levels.h.
const std::vector<std::string>& sigma_schedules();
/// The kind of levels that a config's switches or its sigma_schedule select: training, lu, or one of the above. Throws
/// invalid_config if two of them do.
std::string sigma_kind(const nlohmann::json& config);
/// `n` levels from `top` to `bottom`; only `top` for n = 1. kind: karras (evenly in σ^(1/7)), exponential or lu (in log
/// σ), beta (at quantiles of Beta(0.6, 0.6)), kl_optimal (in atan σ).
std::vector<double> levels_between(const std::string& kind, double top, double bottom, int64_t n);
/// Stretches decreasing flow sigmas so that the last one is `terminal`; no effect on a single one.
void stretch_shift_to_terminal(double terminal, std::vector<double>& sigmas);

/// Euler and LMS: the derivative of the sample x0 + σ·ε by σ, which is ε.
Form sigma_derivative(const std::string& prediction_type, double sigma, const Knowns& k);
/// Euler and LMS: 1/√(σ² + 1), the scale of the model's input.
double sigma_input_scale(double sigma);
/// Euler and LMS: standard deviation of the initial noise.
double sigma_init_noise(const SigmaGrid& grid, const SigmaLevels& levels);

/// DPM-Solver and UniPC: α, σ' and half the log SNR (infinite without noise).
struct SnrLevel {
  double alpha, sigma, lambda;
};
std::vector<SnrLevel> snr_levels(const SigmaLevels& levels, bool flow);

}  // namespace md
