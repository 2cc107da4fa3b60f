#include "maxdiffusion/models/latent_colours.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

struct Space {
  double scale;  // LatentScale::scale of the first channel
  LatentColours colours;
};

/// Source of the numbers: ComfyUI, comfy/latent_formats.py (SD15, SDXL, Flux, Wan21), which fits them by least squares.
const std::vector<Space>& spaces() {
  static const std::vector<Space> all = {
      // Stable Diffusion 1 and 2.
      {0.18215,
       {{0, 0, 0},
        {{0.3512, 0.2297, 0.3227}, {0.3250, 0.4974, 0.2350}, {-0.2829, 0.1762, 0.2721}, {-0.2120, -0.2616, -0.7177}}}},
      // SDXL.
      {0.13025,
       {{0.1084, -0.0175, -0.0011},
        {{0.3651, 0.4232, 0.4341},
         {-0.2533, -0.0042, 0.1068},
         {0.1076, 0.1111, -0.0362},
         {-0.3165, -0.2492, -0.2188}}}},
      // FLUX.1 and Z-Image.
      {0.3611,
       {{-0.0329, -0.0718, -0.0851},
        {{-0.0346, 0.0244, 0.0681},
         {0.0034, 0.0210, 0.0687},
         {0.0275, -0.0668, -0.0433},
         {-0.0174, 0.0160, 0.0617},
         {0.0859, 0.0721, 0.0329},
         {0.0004, 0.0383, 0.0115},
         {0.0405, 0.0861, 0.0915},
         {-0.0236, -0.0185, -0.0259},
         {-0.0245, 0.0250, 0.1180},
         {0.1008, 0.0755, -0.0421},
         {-0.0515, 0.0201, 0.0011},
         {0.0428, -0.0012, -0.0036},
         {0.0817, 0.0765, 0.0749},
         {-0.1264, -0.0522, -0.1103},
         {-0.0280, -0.0881, -0.0499},
         {-0.1262, -0.0982, -0.0778}}}},
      // Wan 2.1 and Qwen-Image: latents divided by deviations, the first of which is 2.8184.
      {1 / 2.8184,
       {{-0.1835, -0.0868, -0.3360},
        {{-0.1299, -0.1692, 0.2932},
         {0.0671, 0.0406, 0.0442},
         {0.3568, 0.2548, 0.1747},
         {0.0372, 0.2344, 0.1420},
         {0.0313, 0.0189, -0.0328},
         {0.0296, -0.0956, -0.0665},
         {-0.3477, -0.4059, -0.2925},
         {0.0166, 0.1902, 0.1975},
         {-0.0412, 0.0267, -0.1364},
         {-0.1293, 0.0740, 0.1636},
         {0.0680, 0.3019, 0.1128},
         {0.0032, 0.0581, 0.0639},
         {-0.1251, 0.0927, 0.1699},
         {0.0060, -0.0633, 0.0005},
         {0.3477, 0.2275, 0.2950},
         {0.1984, 0.0913, 0.1861}}}},
  };
  return all;
}

const Space* space_of(const Autoencoder& a) {
  for (const Space& s : spaces())
    if (std::ssize(s.colours.factors) == a.channels && std::abs(a.latent_scale.scale[0] / s.scale - 1) < 1e-4)
      return &s;
  return nullptr;
}

}  // namespace

HostArray LatentColours::of(const HostArray& latents) const {
  Dims dims = latents.dims();
  const auto channels = static_cast<int64_t>(factors.size());
  check(dims.back() == channels, Code::internal, "latents of {} channels; expected {}", dims.back(), channels);
  dims.back() = 3;
  HostArray out(Shape{DType::f32, dims});
  auto from = latents.view<float>().begin();
  auto to = out.mutable_view<float>();
  for (size_t at = 0; at < to.size(); at += 3, from += channels)
    for (size_t k = 0; k < 3; ++k) {
      double sum = bias[k];
      for (int64_t c = 0; c < channels; ++c) sum += static_cast<double>(from[c]) * factors[static_cast<size_t>(c)][k];
      to[at + k] = static_cast<float>(sum);
    }
  return out;
}

LatentColours latent_colours(const Autoencoder& a) {
  if (const Space* s = space_of(a)) return s->colours;
  constexpr double kPart = 0.4;  // latents of the denoiser have a deviation of about 1
  LatentColours out{{}, std::vector<std::array<double, 3>>(static_cast<size_t>(a.channels))};
  for (size_t k = 0; k < 3; ++k) out.factors.at(std::min(k, out.factors.size() - 1))[k] = kPart;
  return out;
}

bool has_latent_colours(const Autoencoder& a) { return space_of(a) != nullptr; }

}  // namespace md
