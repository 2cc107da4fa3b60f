// Schedulers: host tables in double, and the graph steps that read one row of them. Immutable. Source: Ho et al. 2020
// (DDPM); Karras et al. 2022 (Euler); names of config fields as diffusers writes them.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <memory>
#include <optional>
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
  /// prediction_type). `flow`: accepts flow_prediction. Throws invalid_config.
  static NoiseSchedule from_json(const nlohmann::json& config, bool flow = false);
};

/// √ᾱ_t·x0 + √(1−ᾱ_t)·noise.   x0, noise: [B, …] f32   t: [B] s32.
Tensor add_noise(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t);
/// The prediction target (epsilon, v, sample), of x0's shape.
Tensor training_target(const NoiseSchedule& n, Tensor x0, Tensor noise, Tensor t);
/// Per-sample loss weight of min-SNR-γ (γ ≤ 0: ones). [B]. Source: Hang et al. 2023.
Tensor snr_weight(const NoiseSchedule& n, Tensor t, double gamma);
/// table[t]: a value for each sample, [B]. table: one for each training timestep.
Tensor value_at_timestep(const std::vector<double>& table, Tensor t);
/// Timesteps that are sampled `multiplier` times as often as the others: the last `portion` of all (later), the first
/// (earlier), or those in [begin, end) (range). Source: diffusers' and MaxDiffusion's `timestep_bias`.
struct TimestepBias {
  std::string strategy = "none";  // none, earlier, later, range
  double multiplier = 1, portion = 0.25;
  int64_t begin = 0, end = 1000;
  /// From the key timestep_bias: field → value as JSON. Throws invalid_config naming the field.
  static TimestepBias from_map(const std::map<std::string, std::string>& fields);
  /// Sampling weights of T timesteps. Throws invalid_config naming a field that does not fit.
  std::vector<double> weights(int64_t T) const;
};
/// Timesteps [B] s32 in [first, last) or, without `last`, up to T: uniform, or weighted by `bias`.
Tensor sample_timesteps(const NoiseSchedule& n, Rng rng, int64_t batch, const TimestepBias& bias = {},
                        int64_t first = 0, std::optional<int64_t> last = {});

/// A sample is signal·x0 + noise·ε.
struct NoiseLevel {
  double signal = 1, noise = 0;
};

/// One row per model call; the columns depend on the scheduler.
struct SampleTable {
  std::vector<double> timesteps;           // the model's timestep input, one per row
  std::vector<double> training_timesteps;  // of the same levels, in [0, T): differ where the model gets log σ
  HostArray rows;                          // f32 [n, columns]
  double init_noise_sigma = 1;             // initial latents = noise × this
  std::vector<NoiseLevel> levels;          // level of each row's input sample
  /// For each row, the change of the new sample per change of the model's output through the noise alone, not through
  /// x0. Empty: the new samples are not sums of x0 and noise.
  std::vector<double> renoise = {};
};

class Scheduler {
 public:
  virtual ~Scheduler() = default;
  virtual std::string name() const = 0;
  /// The rows of steps `first` to `steps` − 1; the first of them has no history of earlier steps. Pure host arithmetic
  /// in double. Throws invalid_config (steps < 1, > T, unknown spacing; a sampler that cannot start at `first`).
  virtual SampleTable table(int64_t steps, int64_t first = 0) const = 0;
  /// Whether steps add noise.
  virtual bool stochastic() const { return false; }
  /// Number of carried arrays of the sample's shape (multistep history).
  virtual int64_t history() const { return 0; }
  /// Model input for this row. row: f32 [columns].
  virtual Tensor scale_input(Tensor sample, Tensor row) const = 0;
  /// New sample (and new history) from the model's output. `noise`: for stochastic samplers.
  virtual std::vector<Tensor> step(Tensor output, Tensor sample, Tensor row, const std::vector<Tensor>& history,
                                   Rng noise) const = 0;
};

/// The text of scheduler_config.json. Throws invalid_config.
nlohmann::json parse_scheduler_config(const std::string& text);

/// Properties of the sample on which noise levels depend.
struct SampleFacts {
  int64_t tokens = 0;  // tokens of one sample in the denoiser; 0: unknown, which use_dynamic_shifting rejects
  /// Flow-matching Euler: sigmas before the shift are linspace(1, 1/n, n), as some diffusers pipelines pass them,
  /// instead of ending at the sigma of the first training timestep.
  bool even_flow_steps = false;
  /// Logarithm of the shift of use_dynamic_shifting; absent: linear in `tokens`, as the config says.
  std::optional<double> log_shift = {};
};

/// By the `_class_name` of scheduler_config.json, with or without the prefix Flax; throws with the list of supported
/// names for another. Warns of unknown fields; throws for unsupported switches that are on. use_dynamic_shifting of a
/// flow-matching model replaces the shift by one that depends on the number of tokens.
std::unique_ptr<Scheduler> make_scheduler(const nlohmann::json& config, const SampleFacts& facts = {});
std::vector<std::string> scheduler_names();

}  // namespace md
