// Interface to FFmpeg's libraries (libavformat, libavcodec, libswscale). They have many dependencies, so the shared
// library that implements it (maxdiffusion/media/libav/) is opened on first use, and no other file includes their
// headers. Errors are md::Error, io, "<name>: <reason>". A reader belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/media/image_size.h"

namespace md {

/// Largest accepted size: a header can declare any, and a decoder buffers about twenty frames.
constexpr int64_t kMaxVideoPixels = int64_t{8192} * 8192;

/// A decoded frame.
class VideoFrame {
 public:
  virtual ~VideoFrame() = default;
  /// Seconds since the video's first frame.
  virtual double time() const = 0;
  /// Writes u8 [H, W, 3] of the reader's size(); transparent pixels over white.
  virtual void rgb(uint8_t* to) const = 0;
};

/// A video from its first frame to its last. Sizes and times are those of the decoded frames, not of the header.
class VideoReader {
 public:
  virtual ~VideoReader() = default;
  /// Size of every frame, upright and with square pixels.
  virtual ImageSize size() const = 0;
  /// Absent at the end. Throws io if the next frame does not decode or its size differs. Frames must not outlive the
  /// reader.
  virtual std::unique_ptr<VideoFrame> next() = 0;
  /// Seeks: next() continues at a frame at or before `time`.
  virtual void skip_to(double time) = 0;
  /// The time of every stored frame, ascending, found without decoding. Includes frames that do not decode.
  virtual std::vector<double> times() const = 0;
};

struct Mp4Config {
  double fps = 16;
  /// Quantizer of H.264 (CRF): 0 is lossless except for the colour conversion; +6 halves the bitrate.
  double quality = 17;
  /// Full chroma resolution (4:4:4): sharper, but browsers and TVs play only 4:2:0.
  bool full_colour = false;
  int threads = 0;  // 0: the cores; the bytes depend on it
};

class VideoLibrary {
 public:
  virtual ~VideoLibrary() = default;
  /// Decodes the first frame. `bytes` must outlive the reader: mp4, mov, mkv, webm, avi or gif, detected by content.
  /// `threads` that decode one video; 0: all cores. `as_stored`: frames are not rotated.
  virtual std::unique_ptr<VideoReader> open(std::string_view bytes, const std::string& name, int threads,
                                            bool as_stored = false) const = 0;
  /// u8 [frames, height, width, 3], sides even → the bytes of an MP4 file: H.264, BT.709, index first (faststart).
  virtual std::string encode_mp4(const uint8_t* rgb, int64_t frames, ImageSize size, const Mp4Config& config,
                                 const std::string& name) const = 0;
};

/// Opens the library on first use. Throws io naming it.
const VideoLibrary& video_library();

}  // namespace md
