// Animated WebP as a video, through libwebp's own demuxer: FFmpeg's libraries read still images only.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "maxdiffusion/media/video_library.h"

namespace md {

bool is_animated_webp(std::string_view bytes);
/// `bytes` must outlive the reader. Throws io.
std::unique_ptr<VideoReader> open_animated_webp(std::string_view bytes, const std::string& name);

}  // namespace md
