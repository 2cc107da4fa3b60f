// For files of the library behind video_library.h only.
#pragma once

extern "C" {
#include <libavcodec/avcodec.h>
#include <libavformat/avformat.h>
#include <libavutil/display.h>
#include <libavutil/imgutils.h>
#include <libavutil/opt.h>
#include <libavutil/pixdesc.h>
#include <libswscale/swscale.h>
}

#include <memory>
#include <string>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/media/video_library.h"

namespace md {

template <auto destroy>
struct Destroy {
  template <class T>
  void operator()(T* p) const {
    destroy(p);
  }
  template <class T>
  requires std::is_invocable_v<decltype(destroy), T**>
  void operator()(T* p) const { destroy(&p); }
};
/// Frees memory that FFmpeg may have reallocated.
inline void free_io(AVIOContext* io) {
  if (io) av_freep(&io->buffer);
  avio_context_free(&io);
}
using IoPtr = std::unique_ptr<AVIOContext, Destroy<free_io>>;
using InputPtr = std::unique_ptr<AVFormatContext, Destroy<avformat_close_input>>;
using OutputPtr = std::unique_ptr<AVFormatContext, Destroy<avformat_free_context>>;
using CodecPtr = std::unique_ptr<AVCodecContext, Destroy<avcodec_free_context>>;
using PacketPtr = std::unique_ptr<AVPacket, Destroy<av_packet_free>>;
using FramePtr = std::unique_ptr<AVFrame, Destroy<av_frame_free>>;
using ScalerPtr = std::unique_ptr<SwsContext, Destroy<sws_freeContext>>;

/// FFmpeg's last log message of this thread, which is cleared; else the text of the error code.
std::string reason_of(int error);
void clear_ffmpeg_log();

/// Throws io "<name>: <what>: <reason>" for an error code.
inline int require(int result, const std::string& name, const char* what) {
  if (result < 0) fail(Code::io, "{}: {}: {}", name, what, reason_of(result));
  return result;
}

std::unique_ptr<VideoReader> open_video(std::string_view bytes, const std::string& name, int threads, bool as_stored);
std::string encode_mp4_bytes(const uint8_t* rgb, int64_t frames, ImageSize size, const Mp4Config& config,
                             const std::string& name);

}  // namespace md
