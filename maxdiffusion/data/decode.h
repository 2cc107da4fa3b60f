// Decoders of single formats, chosen by decode_image_bytes (decode.cc) from the first bytes. All give u8 [H, W, 3] with
// alpha over white, and throw io "<name>: <format>: <reason>".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "maxdiffusion/base/host_array.h"

namespace md {

HostArray decode_png(std::span<const uint8_t> bytes, const std::string& name);
/// `side` as of decode_image_bytes.
HostArray decode_jpeg(std::span<const uint8_t> bytes, const std::string& name, int64_t side);
HostArray decode_webp(std::span<const uint8_t> bytes, const std::string& name);

/// Throws io for sizes that no training picture has: a header can claim gigabytes in a few bytes.
void check_picture_size(int64_t height, int64_t width, const std::string& name);
/// u8 [H, W, 4], straight alpha → u8 [H, W, 3] over white.
HostArray over_white(const HostArray& rgba);

}  // namespace md
