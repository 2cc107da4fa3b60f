// T2I-Adapter: features of an image that are added to those of a UNet's down blocks. Source: Mou et al. 2023; names and
// details as diffusers' T2IAdapter (full_adapter, full_adapter_xl, light_adapter).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/nn/scope.h"

namespace md {

struct T2iAdapterConfig {
  std::string adapter_type = "full_adapter";
  int64_t in_channels = 3, num_res_blocks = 2, downscale_factor = 8;
  std::vector<int64_t> channels = {320, 640, 1280, 1280};

  /// Sides of the image are multiples of this, in pixels.
  int64_t multiple() const;
  static T2iAdapterConfig from_json(const nlohmann::json& config);
};
/// image: [B, H, W, in_channels] in [0, 1] → features of each block, [B, h, w, C], finest first.
std::vector<Tensor> t2i_adapter(const Scope& s, const T2iAdapterConfig& c, Tensor image);
/// Creates every parameter (registry.h).
void trace_t2i_adapter(const Scope& s, const T2iAdapterConfig& config);

}  // namespace md
