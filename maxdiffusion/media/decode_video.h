// Videos as frames: mp4, mov, mkv, webm, avi and gif through FFmpeg's libraries, animated WebP, and single images as
// videos of one frame. Formats are recognized by the first bytes, not by the name. Sizes and times are those of decoded
// frames, not of headers. Frames are u8 [H, W, 3], RGB, upright, with square pixels, over white.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/media/video_library.h"
#include "maxdiffusion/storage/storage.h"

namespace md {

/// Selection of frames. Frame i is the stored frame nearest to the time start + i / fps, the earlier of two equally
/// near ones; frames are skipped or repeated if the rates differ. The last stored frame is assumed to last as long as
/// the one before it (less a quarter, because files round times).
struct FrameTimes {
  double fps = 0;     // 0: every stored frame
  double start = 0;   // seconds since the first frame
  int64_t most = -1;  // frames; −1: to the end
};

/// u8 [F, H, W, 3]. `threads` that decode; 0: one for each core. Throws io "<name>: <reason>" if `bytes` is not a video
/// or has no video stream, the size changes, a frame is corrupt, `start` is after the end, or the result needs more
/// than kMaxVideoBytes.
HostArray decode_video(std::string_view bytes, const std::string& name, const FrameTimes& times = {}, int threads = 0);
HostArray decode_video(const std::string& file, const FrameTimes& times = {});
constexpr int64_t kMaxVideoBytes = int64_t{8} << 30;

/// Opens a video for reading frame by frame. `bytes` must outlive the reader. Throws io.
std::unique_ptr<VideoReader> open_video(std::string_view bytes, const std::string& name, int threads);
/// Images (PNG, JPEG or WebP, all of one size) as a video of `fps`; decoded one by one.
std::unique_ptr<VideoReader> open_image_sequence(std::vector<Blob> images, const std::string& name, double fps);

/// Calls `take` for each selected frame, in order, and returns their number. A repeated frame is passed twice.
int64_t each_frame(VideoReader& video, const FrameTimes& times, const std::function<void(const VideoFrame&)>& take);
/// Number of frames that each_frame selects from a video whose frames have these times, if all decode.
int64_t frames_in(const std::vector<double>& stored, double fps, double start = 0);

}  // namespace md
