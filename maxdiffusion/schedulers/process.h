// Noise processes: how a sample is made noisy in training, and what the model should predict. They are apart from the
// samplers (scheduler.h); which process a model is trained with follows from its scheduler_config.json. Sources: Ho et
// al. 2020 (ddpm); Lipman et al. 2023 (flow_match).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/ops/random.h"

namespace md {

/// Keys of the noise of training.
struct ProcessKeys {
  double snr_gamma = -1, train_flow_shift = 3;
  bool disable_training_weights = false;
  std::string timestep_lookup = "exact";
  std::map<std::string, std::string> timestep_bias;
  template <class V>
  void visit(V&& v) {
    v("snr_gamma", snr_gamma, "min-SNR loss weighting; <= 0: off");
    v("timestep_bias", timestep_bias,
      "timesteps sampled more often: strategy (none, earlier, later, range), multiplier, portion, begin, end "
      "(exclusive)");
    v("train_flow_shift", train_flow_shift, "flow matching: shift of the sampled timesteps; above 1: towards noise");
    v("disable_training_weights", disable_training_weights, "flow matching: all times weigh the same");
    v("timestep_lookup", timestep_lookup,
      "flow matching: the timestep of a noise level σ; exact: 1000 σ, as in sampling; reference_table: that of "
      "MaxDiffusion's training, whose level at time 0 is 0.003",
      one_of({"exact", "reference_table"}));
  }
};

/// Immutable; thread safe.
class NoiseProcess {
 public:
  virtual ~NoiseProcess() = default;
  /// Times are in [0, num_train_timesteps), of this type: s32 or f32.
  virtual int64_t num_train_timesteps() const = 0;
  virtual DType timestep_dtype() const = 0;
  /// Times of a batch, [B].
  virtual Tensor sample_timesteps(Rng rng, int64_t batch) const = 0;
  /// x0, noise: [B, …] f32; t: [B].
  virtual Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const = 0;
  /// What the model should predict, of x0's shape.
  virtual Tensor target(Tensor x0, Tensor noise, Tensor t) const = 0;
  /// Factors of the samples' losses, [B]; empty where all are 1.
  virtual Tensor weight(Tensor t) const = 0;
  /// Times at which samples have these noise levels σ, for batches that other programs recorded. Throws invalid_config
  /// where the process has no such levels.
  virtual HostArray timesteps_from_sigmas(const HostArray& sigmas) const;
  /// This process with times in [from, to) alone, drawn as often as before among each other. Throws invalid_config
  /// where it cannot.
  virtual std::shared_ptr<const NoiseProcess> restricted_to(double from, double to) const;
  /// Of a process that restricted_to() returned: how often the whole one draws a time of it, and whether it has time t.
  virtual double probability() const { return 1; }
  virtual bool contains(double /*t*/) const { return true; }
  /// What the model takes as its time, [B].
  virtual Tensor model_timestep(Tensor t) const { return t; }
  /// This process without loss weights and without a bias of times: for evaluation.
  virtual std::shared_ptr<const NoiseProcess> unweighted() const = 0;
};

/// Whether a scheduler_config.json is of a model that is trained by flow matching.
bool is_flow_matching(const nlohmann::json& scheduler_config);
/// The process of a scheduler_config.json: flow_match where its prediction_type is flow_prediction or, without
/// one, its sampler takes flow-matching models alone (FlowMatchEulerDiscreteScheduler); else ddpm. Throws
/// invalid_config for fields and keys whose values it cannot take, and for keys that this process would not obey.
std::shared_ptr<const NoiseProcess> make_process(const nlohmann::json& scheduler_config, const ProcessKeys& keys);
/// "ddpm", "flow_match".
std::vector<std::string> process_names();

}  // namespace md
