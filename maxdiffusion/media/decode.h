// Decoders of single formats, chosen by decode_stored_image (decode.cc) from the first bytes. All satisfy the contract
// of decode_stored_image, but give images as stored: their orientation is applied there. They throw io
// "<name>: <format>: <reason>".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "maxdiffusion/media/decode_image.h"

namespace md {

DecodedImage decode_png(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);
DecodedImage decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);
DecodedImage decode_webp(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);

/// Throws io if a header declares too many pixels: a few bytes could otherwise allocate gigabytes.
void check_image_size(int64_t height, int64_t width, const std::string& name);
/// u8 [H, W, 4], straight alpha → colours over white; with `apart`, the stored colours and alpha separately.
DecodedImage from_rgba(const HostArray& rgba, bool apart);

}  // namespace md
