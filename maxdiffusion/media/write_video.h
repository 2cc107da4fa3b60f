// Videos as files: MP4, and frames as PNG.
#pragma once

#include <string>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/video_library.h"

namespace md {

/// frames: u8 [F, H, W, 3]. Written to a temporary name and renamed. A side that is odd, which H.264's colours cannot
/// have, becomes even by repeating the last row or column. Throws io (naming the path), invalid_config for settings out
/// of range.
void write_mp4(const std::string& path, const HostArray& frames, const Mp4Config& config = {});
/// The same, as the bytes of the file; `name`: for messages.
std::string encode_mp4(const HostArray& frames, const Mp4Config& config, const std::string& name);
/// `folder`/0000.png, 0001.png, …
void write_frames(const std::string& folder, const HostArray& frames);

}  // namespace md
