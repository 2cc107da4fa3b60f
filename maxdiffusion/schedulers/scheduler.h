// Schedulers: host tables in double, and the graph steps that read one row of them. No member changes while sampling.
// Source: Ho et al. 2020 (DDPM); Karras et al. 2022 (Euler); names of config fields as diffusers writes them.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/ops/random.h"

namespace md {

/// The noise schedule of training: tables over the T training timesteps, in double.
struct NoiseSchedule {
  int64_t num_train_timesteps = 1000;
  std::vector<double> betas, alphas_cumprod;
  std::string prediction_type = "epsilon";  // epsilon, v_prediction, sample

  /// From scheduler_config.json (beta_start, beta_end, beta_schedule, trained_betas, rescale_betas_zero_snr,
  /// prediction_type). `flow`: flow_prediction is known too, which only samplers on flow σ are. Throws invalid_config.
  static NoiseSchedule from_json(const nlohmann::json& config, bool flow = false);
};

/// √ᾱ_t·x0 + √(1−ᾱ_t)·noise.   x0, noise: [B, …] f32   t: [B] s32.
Tensor add_noise(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t);
/// What the model should predict (epsilon, v, sample), same shape as x0.
Tensor training_target(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t);
/// Per-sample loss weight of min-SNR-γ (γ ≤ 0: ones). [B]. Source: Hang et al. 2023.
Tensor snr_weight(const NoiseSchedule& n, Tensor t, double gamma);
/// Which training timesteps come more often, as a multiple of `multiplier` of the others: the last `portion` of all
/// (later), the first (earlier), or those in [begin, end) (range). Source: diffusers' and MaxDiffusion's
/// `timestep_bias`.
struct TimestepBias {
  std::string strategy = "none";  // none, earlier, later, range
  double multiplier = 1, portion = 0.25;
  int64_t begin = 0, end = 1000;
  /// From the key timestep_bias: member → its value as JSON. Throws invalid_config naming the member.
  static TimestepBias from_map(const std::map<std::string, std::string>& fields);
  /// Throws invalid_config naming the member that does not fit T timesteps.
  std::vector<double> weights(int64_t T) const;
};
/// Timesteps [B] s32 in [0, T): uniform, or as `bias` weighs them.
Tensor sample_timesteps(const NoiseSchedule& n, Rng rng, int64_t batch, const TimestepBias& bias = {});

/// One row per call of the model; columns are the scheduler's own.
struct SampleTable {
  std::vector<double> timesteps;  // given to the model, one per row
  HostArray rows;                 // f32 [n, columns]
  double init_noise_sigma = 1;    // initial latents = noise × this
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual std::string name() const = 0;
  /// Pure host arithmetic in double. Throws invalid_config (steps < 1, > T, unknown spacing).
  virtual SampleTable table(int64_t steps) const = 0;
  /// Arrays carried from step to step beside the sample (multistep history), as multiples of the sample's shape.
  virtual int64_t history() const { return 0; }
  /// Model input for this row. row: f32 [columns].
  virtual Tensor scale_input(Tensor sample, Tensor row) const = 0;
  /// New sample (and new history) from the model's output. `noise`: a normal draw of the sample's shape, used by
  /// stochastic samplers only.
  virtual std::vector<Tensor> step(Tensor output, Tensor sample, Tensor row, const std::vector<Tensor>& history,
                                   Rng noise) const = 0;
};

/// The text of scheduler_config.json. Throws invalid_config.
nlohmann::json parse_scheduler_config(const std::string& text);

/// What is sampled, as far as noise levels depend on it.
struct SampleFacts {
  int64_t tokens = 0;  // of one sample in the denoiser, for use_dynamic_shifting; 0: not known, and that is refused
  /// Before the shift, flow-matching Euler's levels go from 1 to 0 in even steps, as pipelines of some models give
  /// them to diffusers' sampler (sigmas = linspace(1, 1/n, n)), and not from 1 to that of the first training timestep.
  bool even_flow_steps = false;
};

/// By the `_class_name` of scheduler_config.json, with or without the prefix Flax; unknown names are refused with the
/// list of known ones. Members that no sampler here knows are named in a warning, switches that this one does not
/// know are refused. use_dynamic_shifting of a flow-matching model replaces the sampler's shift by one that grows with
/// the number of tokens.
std::unique_ptr<Scheduler> make_scheduler(const nlohmann::json& config, const SampleFacts& facts = {});
std::vector<std::string> scheduler_names();

}  // namespace md
