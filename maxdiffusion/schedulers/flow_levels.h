// Noise levels of samplers whose class supports only flow-matching models. The sample is (1 − σ)·x0 + σ·ε, and the
// model predicts ε − x0. Levels are evenly spaced between the shifted ends of training and then shifted, as in
// diffusers; with timestep_spacing trailing they are evenly spaced from 1 to 1/n before the shift, as some pipelines
// configure diffusers. Sources: Lipman et al. 2023; Esser et al. 2024, equation 23 (shift).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

namespace md {

struct FlowLevels {
  int64_t T = 1000;
  double shift = 1;
  std::optional<double> terminal;
  std::string kind;  // sigma_kind()
  bool inverted = false, trailing = false, by_size = false;

  /// From scheduler_config.json: num_train_timesteps, shift, shift_terminal, invert_sigmas, timestep_spacing,
  /// use_dynamic_shifting (`shift` then depends on the sample's size, and does not apply to training), use_…_sigmas,
  /// sigma_schedule. Throws invalid_config.
  static FlowLevels from_json(const nlohmann::json& config);
  /// One level for each step, then the final one: 0, or 1 if inverted. Throws invalid_config unless steps is in [1, T].
  std::vector<double> sigmas(int64_t steps) const;
  /// The model's timestep input for a level.
  double timestep(double sigma) const { return sigma * static_cast<double>(T); }
};

}  // namespace md
