// Noise processes: noise and prediction target of training. Independent of the samplers (scheduler.h);
// scheduler_config.json selects the process. Sources: Ho et al. 2020 (ddpm); Lipman et al. 2023 (flow_match); Esser et
// al. 2024 (times and weights of flow matching), with the names of diffusers' scripts and of kohya's sd-scripts.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/ops/random.h"

namespace md {

/// Keys of training noise.
struct ProcessKeys {
  double snr_gamma = -1, train_flow_shift = 3;
  double logit_mean = 0, logit_std = 1, mode_scale = 1.29, sigmoid_scale = 1;
  bool disable_training_weights = false, debiased_estimation_loss = false, scale_v_pred_loss_like_noise_pred = false;
  std::string timestep_lookup = "exact", timestep_sampling = "uniform", weighting_scheme = "bell";
  std::map<std::string, std::string> timestep_bias;
  int64_t min_timestep = 0;
  std::optional<int64_t> max_timestep;
  template <class V>
  void visit(V&& v) {
    v("snr_gamma", snr_gamma, "min-SNR loss weighting; <= 0: off");
    v("debiased_estimation_loss", debiased_estimation_loss,
      "weigh the loss by 1/√SNR, with v prediction by 1/(SNR + 1), with SNR of at most 1000");
    v("scale_v_pred_loss_like_noise_pred", scale_v_pred_loss_like_noise_pred,
      "v prediction: weigh the loss by SNR/(SNR + 1), with SNR of at most 1000");
    v("timestep_bias", timestep_bias,
      "timesteps sampled more often: strategy (none, earlier, later, range), multiplier, portion, begin, end "
      "(exclusive)");
    v("min_timestep", min_timestep, "the first timestep that is trained, of those with the least noise", at_least(0));
    v("max_timestep", max_timestep, "timesteps below this are trained; null: num_train_timesteps", at_least(1));
    v("timestep_sampling", timestep_sampling,
      "flow matching: how timesteps are distributed before train_flow_shift moves them; sigmoid, shift, flux_shift: as "
      "sigmoid_scale says, not moved, moved by train_flow_shift, or as the number of the sample's tokens says",
      one_of({"uniform", "logit_normal", "mode", "cosmap", "sigmoid", "shift", "flux_shift"}));
    v("logit_mean", logit_mean, "timestep_sampling=logit_normal: mean of the logit; above 0: towards data");
    v("logit_std", logit_std, "timestep_sampling=logit_normal: deviation of the logit", at_least(above(0)));
    v("mode_scale", mode_scale, "timestep_sampling=mode: above 0 favours the middle, below 0 the ends",
      in_range(-1, 1.75));
    v("sigmoid_scale", sigmoid_scale, "timestep_sampling=sigmoid, shift and flux_shift: deviation of the logit",
      at_least(above(0)));
    v("train_flow_shift", train_flow_shift, "flow matching: shift of the sampled timesteps; above 1: towards noise");
    v("weighting_scheme", weighting_scheme,
      "flow matching: loss weights; bell: MaxDiffusion's, around the middle; none: all equal; sigma_sqrt: 1/σ²; "
      "cosmap: "
      "2/(π(1 − 2σ + 2σ²))",
      one_of({"bell", "none", "sigma_sqrt", "cosmap"}));
    v("disable_training_weights", disable_training_weights,
      "flow matching: true weighs all timesteps equally, as weighting_scheme=none");
    v("timestep_lookup", timestep_lookup,
      "flow matching: the timestep of a noise level σ; exact: 1000 σ, as in sampling; reference_table: the timestep of "
      "MaxDiffusion's training, whose level at time 0 is 0.003",
      one_of({"exact", "reference_table"}));
  }
};

/// Immutable; thread safe.
class NoiseProcess {
 public:
  virtual ~NoiseProcess() = default;
  /// Timesteps are in [0, num_train_timesteps); their type: s32 or f32.
  virtual int64_t num_train_timesteps() const = 0;
  virtual DType timestep_dtype() const = 0;
  /// Random timesteps of a batch, [B].
  virtual Tensor sample_timesteps(Rng rng, int64_t batch) const = 0;
  /// x0, noise: [B, …] f32; t: [B].
  virtual Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const = 0;
  /// The prediction target, of x0's shape.
  virtual Tensor target(Tensor x0, Tensor noise, Tensor t) const = 0;
  /// Loss weights of the samples, [B]; empty if all are 1.
  virtual Tensor weight(Tensor t) const = 0;
  /// Timesteps with these noise levels σ, for recorded batches of other programs. Throws invalid_config if the process
  /// has no sigmas.
  virtual HostArray timesteps_from_sigmas(const HostArray& sigmas) const;
  /// This process restricted to those of its timesteps that are in [from, to), with unchanged relative probabilities.
  /// Throws invalid_config if it has none there, or if unsupported.
  virtual std::shared_ptr<const NoiseProcess> restricted_to(double from, double to) const;
  /// Of min_timestep, max_timestep and restricted_to(): the probability of the range in the whole process, and whether
  /// the range contains timestep t.
  virtual double probability() const { return 1; }
  virtual bool contains(double /*t*/) const { return true; }
  /// This process for samples of so many tokens; null: it is the same for all.
  virtual std::shared_ptr<const NoiseProcess> for_tokens(int64_t /*tokens*/) const { return {}; }
  /// √ᾱ / (√ᾱ + √(1 − ᾱ)) at the timesteps, [B]; empty if the process has no ᾱ.
  virtual Tensor signal_share(Tensor /*t*/) const { return {}; }
  /// Whether signal_share is there.
  virtual bool has_signal_share() const { return false; }
  /// The timestep input of the model, [B].
  virtual Tensor model_timestep(Tensor t) const { return t; }
  /// This process without loss weights and timestep bias, for evaluation.
  virtual std::shared_ptr<const NoiseProcess> unweighted() const = 0;
};

/// [min_timestep, max_timestep) of T timesteps. Throws invalid_config, naming the keys, for an empty range and one
/// beyond T.
std::pair<int64_t, int64_t> timestep_range(const ProcessKeys& keys, int64_t T);
/// Whether a scheduler_config.json belongs to a flow-matching model.
bool is_flow_matching(const nlohmann::json& scheduler_config);
/// The process of a scheduler_config.json: flow_match if its prediction_type is flow_prediction or, without one, its
/// sampler supports only flow matching (FlowMatchEulerDiscreteScheduler); else ddpm. Throws invalid_config for
/// unsupported values of fields and keys, and for keys that this process does not support.
std::shared_ptr<const NoiseProcess> make_process(const nlohmann::json& scheduler_config, const ProcessKeys& keys);
/// "ddpm", "flow_match".
std::vector<std::string> process_names();

}  // namespace md
