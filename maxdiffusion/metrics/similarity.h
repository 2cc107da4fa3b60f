// Similarity of two images or videos. Source: Wang et al. 2004 (SSIM); details as in scikit-image 0.26 with uint8
// arrays and channels last.
#pragma once

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Mean structural similarity of two u8 [H, W, C], or of videos [F, H, W, C] as one volume: 1 if they are equal.
/// Windows have 7 values along each axis, per channel; on a shorter axis the largest odd number that fits. Throws
/// invalid_config for other types and for shapes that differ.
double structural_similarity(const HostArray& a, const HostArray& b);

/// Peak signal-to-noise ratio in decibels, of u8 arrays of one shape; infinity if they are equal. Throws as above.
double peak_signal_to_noise(const HostArray& a, const HostArray& b);

}  // namespace md
