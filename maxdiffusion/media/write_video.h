// Videos as files: MP4, and frames as PNG.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/video_library.h"

namespace md {

/// frames: u8 [F, H, W, 3]. Written to a temporary name and renamed. Odd sides, which 4:2:0 does not allow, are padded
/// by repeating the last row or column. Throws io (naming the path), invalid_config for settings out of range.
void write_mp4(const std::string& path, const HostArray& frames, const Mp4Config& config = {});
/// As write_mp4, but returns the bytes; `name`: for messages.
std::string encode_mp4(const HostArray& frames, const Mp4Config& config, const std::string& name);
/// `folder`/0000.png, 0001.png, …
void write_frames(const std::string& folder, const HostArray& frames);

}  // namespace md
