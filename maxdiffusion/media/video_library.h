// What this program uses of FFmpeg's libraries (libavformat, libavcodec, libswscale). They draw in many others, so the
// shared library that implements this interface (maxdiffusion/data/video/libav/) is opened when first needed, and no
// other file includes their headers. Errors are md::Error, io, "<name>: <reason>". A reader belongs to one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/media/image_size.h"

namespace md {

/// A header can claim any size in a few bytes, and a decoder keeps about twenty frames.
constexpr int64_t kMaxVideoPixels = int64_t{8192} * 8192;

/// A frame as it was decoded.
class VideoFrame {
 public:
  virtual ~VideoFrame() = default;
  /// Seconds since the video's first frame.
  virtual double time() const = 0;
  /// Writes u8 [H, W, 3] of the reader's size(); what is transparent lies over white.
  virtual void rgb(uint8_t* to) const = 0;
};

/// A video from its first frame to its last. Nothing is believed that the header says: sizes and times are those of the
/// frames themselves.
class VideoReader {
 public:
  virtual ~VideoReader() = default;
  /// Of all frames, upright and with square pixels.
  virtual ImageSize size() const = 0;
  /// Absent at the end. Throws io where the next frame does not decode, or has another size than those before. Frames
  /// must not outlive the reader.
  virtual std::unique_ptr<VideoFrame> next() = 0;
  /// next() goes on with a frame at or before `time`, without decoding all before it where that can be done.
  virtual void skip_to(double time) = 0;
  /// The time of every stored frame, ascending, found without decoding. Frames that do not decode count, too.
  virtual std::vector<double> times() const = 0;
};

struct Mp4Config {
  double fps = 16;
  /// Quantizer of H.264 (CRF): 0 is lossless but for the change of colour space, each 6 halves the bits.
  double quality = 17;
  /// Colours at every pixel (4:4:4): sharper, but browsers and television sets play only 4:2:0.
  bool full_colour = false;
  int threads = 0;  // 0: the cores; other numbers give other bytes
};

class VideoLibrary {
 public:
  virtual ~VideoLibrary() = default;
  /// Decodes the first frame. `bytes` must outlive the reader: mp4, mov, mkv, webm, avi or gif, told by its content.
  /// `threads`: decode one video; 0: the cores.
  virtual std::unique_ptr<VideoReader> open(std::string_view bytes, const std::string& name, int threads) const = 0;
  /// u8 [frames, height, width, 3], sides even → the bytes of an MP4 file: H.264, BT.709, the index in front.
  virtual std::string encode_mp4(const uint8_t* rgb, int64_t frames, ImageSize size, const Mp4Config& config,
                                 const std::string& name) const = 0;
};

/// Opens the library on first use. Throws io naming it.
const VideoLibrary& video_library();

}  // namespace md
