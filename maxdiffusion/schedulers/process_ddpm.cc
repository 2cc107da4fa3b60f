// Discrete timesteps on a table of ᾱ. Sources: Ho et al. 2020; Salimans and Ho 2022 (v prediction); Hang et al. 2023
// (min-SNR weights).
#include "maxdiffusion/base/log.h"
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
        snr_gamma_(keys.snr_gamma) {
    check(keys.timestep_lookup == "exact", Code::invalid_config,
          "timestep_lookup is '{}', but this model is trained on timesteps, not by flow matching; set it to exact",
          keys.timestep_lookup);
    bias_.weights(noise_.num_train_timesteps);  // throws where they do not fit
    if (snr_gamma_ > 0 && noise_.alphas_cumprod.back() == 0 && noise_.prediction_type != "epsilon")
      log_warning(
          "snr_gamma={} and rescale_betas_zero_snr: the losses of the last timesteps have weights near 0, and sampling "
          "starts there; snr_gamma=-1 weighs all equally",
          snr_gamma_);
  }
  int64_t num_train_timesteps() const override { return noise_.num_train_timesteps; }
  DType timestep_dtype() const override { return DType::s32; }
  Tensor sample_timesteps(Rng rng, int64_t batch) const override {
    return md::sample_timesteps(noise_, rng, batch, bias_);
  }
  Tensor add_noise(Tensor x0, Tensor noise, Tensor t) const override { return md::add_noise(noise_, x0, noise, t); }
  Tensor target(Tensor x0, Tensor noise, Tensor t) const override { return training_target(noise_, x0, noise, t); }
  Tensor weight(Tensor t) const override { return snr_gamma_ > 0 ? snr_weight(noise_, t, snr_gamma_) : Tensor(); }
  std::shared_ptr<const NoiseProcess> unweighted() const override {
    auto plain = std::make_shared<Ddpm>(*this);
    plain->bias_ = {};
    plain->snr_gamma_ = -1;
    return plain;
  }

 private:
  NoiseSchedule noise_;
  TimestepBias bias_;
  double snr_gamma_;
};

}  // namespace

std::shared_ptr<const NoiseProcess> make_ddpm(const nlohmann::json& config, const ProcessKeys& keys) {
  return std::make_shared<Ddpm>(config, keys);
}

}  // namespace md
