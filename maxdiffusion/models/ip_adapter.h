// IP-Adapter: tokens of an image, to which the cross attentions of a UNet attend next to the text. Source: Ye et al.
// 2023, and the published files: image_proj.…, the projection of an image encoder's output, or in the `plus` variant a
// resampler of its tokens (Alayrac et al. 2022), and ip_adapter.N.to_k_ip and to_v_ip of the N-th attention.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

struct IpAdapterConfig {
  bool plus = false;                         // a resampler
  int64_t embed = 0, tokens = 0, width = 0;  // of the image encoder's output; number and width of the image's tokens
  int64_t hidden = 0, inner = 0, feed_forward = 0, depth = 0;  // plus: widths and blocks of the resampler
  std::vector<int64_t> layers;  // widths of the attentions: down blocks, up blocks, the mid block

  static IpAdapterConfig from_json(const nlohmann::json& config);
};
/// The text of a config.json with the sizes of a published file's tensors. Throws io, naming the file, for other files
/// and for variants of faces' identities.
std::string ip_adapter_config(const HostArrays& tensors, const std::string& file);

/// image: [B, embed], or of `plus` [B, L, embed] → [B, tokens, width].
Tensor ip_adapter_tokens(const Scope& s, const IpAdapterConfig& c, Tensor image);
/// Attention of q [B, L, N, D] of attention `layer` to the image's tokens [B, T, width] → [B, L, N, D].
Tensor ip_adapter_attention(const Scope& s, const IpAdapterConfig& c, size_t layer, Tensor q, Tensor tokens);
/// Creates every parameter (registry.h).
void trace_ip_adapter(const Scope& s, const IpAdapterConfig& config);

}  // namespace md
