// RRDBNet, the network of ESRGAN and Real-ESRGAN: images to larger images. Source: Wang et al. 2018 (ESRGAN), section
// 3.1 and figure 4; Wang et al. 2021 (Real-ESRGAN), section 3.2, for the small scales.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "maxdiffusion/base/weight_name_map.h"
#include "maxdiffusion/models/autoencoder.h"

namespace md {

struct RrdbNetConfig {
  int64_t channels = 3, width = 64, growth = 32, blocks = 23;
  int64_t doublings = 2;  // enlargements by two
  int64_t unshuffle = 1;  // sides of the squares of pixels that become channels first
  int64_t scale() const { return (int64_t{1} << doublings) / unshuffle; }

  static RrdbNetConfig from_json(const nlohmann::json& config);
};

/// pixels: [B, H, W, channels] in [0, 1] → [B, scale·H, scale·W, channels]. H and W are multiples of `unshuffle`.
Tensor rrdb_net(const Scope& s, const RrdbNetConfig& config, Tensor pixels);
/// For the registry (registry.h). As an autoencoder its latents are the small image, and `decode` enlarges it.
void trace_rrdb_net(const Scope& s, const RrdbNetConfig& config);
std::shared_ptr<Autoencoder> rrdb_upscaler(const RrdbNetConfig& config);
/// Names of the first program's files, model.1.sub.0.RDB1.conv1.0, and of BSRGAN's, RRDB_trunk.0.RDB1.conv1.
WeightNameMap original_rrdb_names(const RrdbNetConfig& config);

}  // namespace md
