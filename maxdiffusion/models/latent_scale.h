// Normalization of latents: the denoiser receives (z − shift)·scale. Source: Rombach et al. 2022, appendix G (rescaling
// of the latent space).
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/tensor.h"

namespace md {

/// One value for each channel of the last axis, or one for all channels.
struct LatentScale {
  std::vector<double> shift = {0}, scale = {1};

  /// Latents, f32 [..., C].
  Tensor apply(Tensor z) const;
  HostArray apply(const HostArray& z) const;
  HostArray undo(const HostArray& z) const;
  /// Standard deviations are scaled, not shifted.
  Tensor apply_to_deviation(Tensor deviation) const;
  /// Moments, f32 [..., 2C]: means, then standard deviations.
  HostArray apply_to_moments(const HostArray& moments) const;
};

/// Calls `take` for the moments of successive groups of samples, each f32 [N, …, 2C].
using EachMoments = std::function<void(const std::function<void(const HostArray&)>& take)>;
/// Mean and standard deviation of all latents with these moments, over all channels.
struct MeanAndStd {
  double mean = 0, deviation = 1;
};
MeanAndStd mean_and_std(const EachMoments& each);

/// Samples a latent from moments [..., 2C] (means, standard deviations): f32 [1, ..., C]. `noise(n)` returns n standard
/// normal numbers.
HostArray sample_latent(const HostArray& moments, const std::function<std::vector<float>(size_t n)>& noise);

}  // namespace md
