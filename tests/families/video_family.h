// A family that has nothing but an autoencoder of videos: an AutoencoderKLWan of the config given.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/wan_vae.h"

namespace md {

class VideoFamily final : public Family {
 public:
  explicit VideoFamily(const nlohmann::json& config) : config_(WanVaeConfig::from_json(config)) {}

  std::string autoencoder() const override { return "vae"; }
  int64_t downscale() const override { return config_.downscale(); }
  int64_t frame_scale() const override { return config_.frame_scale(); }
  Dims latent_dims(const MediaSize& size) const override {
    return {1 + (size.frames - 1) / frame_scale(), size.height / downscale(), size.width / downscale(), config_.z_dim};
  }
  Posterior encode_chunk(const Models& models, Tensor pixels, MediaState& state) const override {
    return wan_vae_encode(models("vae"), config_, pixels, &state);
  }
  Tensor decode_chunk(const Models& models, Tensor latents, MediaState& state) const override {
    return wan_vae_decode(models("vae"), config_, latents, &state);
  }

  std::string denoiser() const override { return ""; }
  std::vector<Field> text_fields() const override { return {}; }
  HostArrays tokenize(const std::vector<std::string>&) const override { return {}; }
  std::vector<Field> conditioning_fields() const override { return {}; }
  Conditioning encode_text(const Models&, const Conditioning&, int64_t) const override { return {}; }
  Tensor denoise(const Models&, Tensor x, Tensor, const Conditioning&) const override { return x; }

  /// Of the autoencoder, by input name.
  HostArrays random_weights() const {
    Graph g;
    ParamTable params;
    trace_wan_vae(Scope(g, params, "vae"), config_);
    HostArrays weights;
    for (const Param& p : params.params()) weights[p.input] = initial_value(p, 0);
    return weights;
  }

 private:
  WanVaeConfig config_;
};

}  // namespace md
