// Images and latents enlarged on the host or by a network.
#pragma once

#include <memory>
#include <string>

#include "maxdiffusion/encoders/media_autoencoder.h"

namespace md {

/// An upscaler's network with its facts; `decode` of the autoencoder enlarges `downscale` times.
struct Upscaler {
  std::shared_ptr<const Autoencoder> facts;
  MediaAutoencoder& network;
  int64_t tile = 0;  // side of the tiles, pixels; 0: whole images
};

/// Throws invalid_config for a value of the key upscaler_tile that is no multiple of 16.
void check_upscaler_tile(int64_t tile);
/// Of an image's parameters, as AUTOMATIC1111 writes them: how many times as large, by what.
std::string enlargement_text(double factor, const std::string& by);
/// Image u8 [H, W, 3] → u8 [height, width, 3]: enlarged by the network, again while it is smaller, and resized by
/// Lanczos to the size. Without a network by Lanczos alone.
HostArray enlarged(const HostArray& rgb, int64_t height, int64_t width, const Upscaler* upscaler);
/// Latents f32 [N, h, w, C] → f32 [N, height, width, C], bilinear with cells' centres, as torch's interpolate without
/// align_corners and antialias.
HostArray resized_latents(const HostArray& latents, int64_t height, int64_t width);

}  // namespace md
