// Decoders of single formats, chosen by decode_stored_image (decode.cc) from the first bytes. All give what
// decode_stored_image promises, and throw io "<name>: <format>: <reason>".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "maxdiffusion/media/decode_image.h"

namespace md {

DecodedImage decode_png(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);
DecodedImage decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);
DecodedImage decode_webp(std::span<const uint8_t> bytes, const std::string& name, const DecodeOptions& options);

/// Throws io for sizes that no training image has: a header can claim gigabytes in a few bytes.
void check_image_size(int64_t height, int64_t width, const std::string& name);
/// u8 [H, W, 4], straight alpha → colours over white; with `apart`, the colours as stored and alpha beside them.
DecodedImage from_rgba(const HostArray& rgba, bool apart);

}  // namespace md
