// The images that videos begin and end with, as conditioning: seen by an image encoder, and by the autoencoder as the
// frames that are known.
#pragma once

#include <vector>

#include "maxdiffusion/encoders/media_autoencoder.h"

namespace md {

/// images: u8 [H, W, 3] of any size, the first and perhaps the last → Family::image_fields, one row. Throws
/// invalid_config where the family takes more or fewer.
HostArrays condition_on_images(const Devices& devices, const Family& family, const WeightsOf& weights,
                               MediaAutoencoder& autoencoder, const std::vector<HostArray>& images,
                               const MediaSize& size, const ScopeOptions& scope, const CompileConfig& compile);

}  // namespace md
