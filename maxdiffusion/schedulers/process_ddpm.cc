// Discrete timesteps on a table of ᾱ. Sources: Ho et al. 2020; Salimans and Ho 2022 (v prediction); Hang et al. 2023
// (min-SNR weights); Yu et al. 2023 (debiased estimation), as kohya's sd-scripts weighs with it.
#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/schedulers/config_fields.h"
#include "maxdiffusion/schedulers/process.h"
#include "maxdiffusion/schedulers/scheduler.h"

namespace md {
namespace {

class Ddpm final : public NoiseProcess {
 public:
  Ddpm(const nlohmann::json& config, const ProcessKeys& keys)
      : noise_(NoiseSchedule::from_json(config)),
        bias_(TimestepBias::from_map(keys.timestep_bias)),
        range_(timestep_range(keys, noise_.num_train_timesteps)),
        snr_gamma_(keys.snr_gamma) {
    for (const auto& [key, value, plain] : {std::tuple{"timestep_lookup", keys.timestep_lookup, "exact"},
                                            {"timestep_sampling", keys.timestep_sampling, "uniform"},
                                            {"weighting_scheme", keys.weighting_scheme, "bell"}})
      check(value == plain, Code::invalid_config,
            "{} is '{}', but this model is trained on timesteps, not by flow matching; set it to {}", key, value,
            plain);
    const bool of_v = noise_.prediction_type == "v_prediction", ends_in_noise = noise_.alphas_cumprod.back() == 0;
    check(!keys.scale_v_pred_loss_like_noise_pred || of_v, Code::invalid_config,
          "scale_v_pred_loss_like_noise_pred is true, but the model's prediction_type is {}; expected v_prediction",
          noise_.prediction_type);
    check(!keys.debiased_estimation_loss || of_v || !ends_in_noise, Code::invalid_config,
          "debiased_estimation_loss is true, and with rescale_betas_zero_snr the weight of the last timestep is "
          "infinite; "
          "expected prediction_type=v_prediction");
    if (keys.debiased_estimation_loss || keys.scale_v_pred_loss_like_noise_pred)
      for (const double a : noise_.alphas_cumprod) {
        const double snr = std::min(a / (1 - a), 1000.0);
        factors_.push_back((keys.scale_v_pred_loss_like_noise_pred ? snr / (snr + 1) : 1) *
                           (!keys.debiased_estimation_loss ? 1
                            : of_v                         ? 1 / (snr + 1)
                                                           : 1 / std::sqrt(snr)));
      }
    bias_.weights(noise_.num_train_timesteps);  // throws if they do not fit
    if (snr_gamma_ > 0 && noise_.alphas_cumprod.back() == 0 && noise_.prediction_type != "epsilon")
      log_warning(
          "snr_gamma={} and rescale_betas_zero_snr: the losses of the last timesteps have weights near 0, and sampling "
          "starts there; snr_gamma=-1 weighs all equally",
          snr_gamma_);
  }
  int64_t num_train_timesteps() const override { return noise_.num_train_timesteps; }
  DType timestep_dtype() const override { return DType::s32; }
  Tensor sample_timesteps(Rng rng, int64_t batch) const override {
    return md::sample_timesteps(noise_, rng, batch, bias_, range_.first, range_.second);
  }
  bool contains(double t) const override {
    return t >= static_cast<double>(range_.first) && t < static_cast<double>(range_.second);
  }
  Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const override { return md::add_noise(noise_, x0, noise, t); }
  Tensor target(Tensor x0, Tensor noise, Tensor t) const override { return training_target(noise_, x0, noise, t); }
  Tensor weight(Tensor t) const override {
    const Tensor snr = snr_gamma_ > 0 ? snr_weight(noise_, t, snr_gamma_) : Tensor();
    if (factors_.empty()) return snr;
    const Tensor factor = value_at_timestep(factors_, t);
    return snr ? snr * factor : factor;
  }
  Tensor signal_share(Tensor t) const override {
    std::vector<double> shares;
    for (const double a : noise_.alphas_cumprod) shares.push_back(std::sqrt(a) / (std::sqrt(a) + std::sqrt(1 - a)));
    return value_at_timestep(shares, t);
  }
  bool has_signal_share() const override { return true; }
  std::shared_ptr<const NoiseProcess> unweighted() const override {
    auto plain = std::make_shared<Ddpm>(*this);
    plain->bias_ = {};
    plain->snr_gamma_ = -1;
    plain->factors_.clear();
    return plain;
  }

 private:
  NoiseSchedule noise_;
  TimestepBias bias_;
  std::pair<int64_t, int64_t> range_;
  double snr_gamma_;
  std::vector<double> factors_;  // of the weights by timestep; empty: none
};

}  // namespace

std::shared_ptr<const NoiseProcess> make_ddpm(const nlohmann::json& config, const ProcessKeys& keys) {
  return std::make_shared<Ddpm>(config, keys);
}

}  // namespace md
