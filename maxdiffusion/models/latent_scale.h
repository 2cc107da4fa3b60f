// The scale of latents: the denoiser sees (z − shift)·scale. Every use of an autoencoder's statistics goes through
// here. Source: Rombach et al. 2022, appendix G (rescaling of the latent space).
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
  /// Standard deviations are multiplied by the scale and not shifted.
  Tensor apply_to_deviation(Tensor deviation) const;
  /// Moments, f32 [..., 2C]: means, then standard deviations.
  HostArray apply_to_moments(const HostArray& moments) const;
};

/// Calls `take` for the moments of one group of samples after the other, each f32 [N, …, 2C].
using EachMoments = std::function<void(const std::function<void(const HostArray&)>& take)>;
/// Mean and standard deviation of all latents whose moments these are, over all channels.
struct MeanAndStd {
  double mean = 0, deviation = 1;
};
MeanAndStd mean_and_std(const EachMoments& each);

/// A latent drawn from moments [..., 2C] (means, standard deviations), as a batch of one: f32 [1, ..., C]. `noise(n)`
/// gives n standard normal numbers.
HostArray sample_latent(const HostArray& moments, const std::function<std::vector<float>(size_t n)>& noise);

}  // namespace md
