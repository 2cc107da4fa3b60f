// A family that only has a video autoencoder: an AutoencoderKLWan with the given config.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/wan_vae.h"

namespace md {

class VideoFamily final : public Family {
 public:
  explicit VideoFamily(const nlohmann::json& config)
      : Family({.autoencoder = video_autoencoder(config)}), config_(WanVaeConfig::from_json(config)) {}

  Conditioning encode_text(const Models&, const Conditioning&, int64_t) const override { return {}; }
  Tensor predict(const Models&, Tensor x, Tensor, const Conditioning&, const PredictOptions&) const override {
    return x;
  }

  /// The autoencoder's weights by input name.
  HostArrays random_weights() const {
    Graph g;
    ParamTable params;
    trace_wan_vae(Scope(g, params, "vae"), config_);
    HostArrays weights;
    for (const Param& p : params.params()) weights[p.input] = initial_value(p, 0);
    return weights;
  }

 private:
  static std::shared_ptr<const Autoencoder> video_autoencoder(const nlohmann::json& config) {
    const std::shared_ptr<Autoencoder> a = wan_autoencoder(WanVaeConfig::from_json(config));
    a->component = "vae";
    return a;
  }

  WanVaeConfig config_;
};

}  // namespace md
