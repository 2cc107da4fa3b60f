// Implementation of video_library.h.
#include <array>
#include <cstdarg>

#include "maxdiffusion/media/libav/libav.h"

namespace md {
namespace {

thread_local std::string complaint;  // FFmpeg's log callback has no other storage

void take_complaint(void* context, int level, const char* format, va_list arguments) {
  if (level > AV_LOG_ERROR) return;
  std::array<char, 256> line{};
  int prefix = 0;
  av_log_format_line2(context, level, format, arguments, line.data(), line.size(), &prefix);
  std::string text = line.data();
  // "[mov,mp4 @ 0x7f…] message\n"
  if (text.starts_with('[') && text.find("] ") != text.npos) text.erase(0, text.find("] ") + 2);
  while (!text.empty() && (text.back() == '\n' || text.back() == '.')) text.pop_back();
  if (!text.empty() && complaint.empty()) complaint = text;
}

class Library : public VideoLibrary {
 public:
  Library() { av_log_set_callback(take_complaint); }
  std::unique_ptr<VideoReader> open(std::string_view bytes, const std::string& name, int threads,
                                    bool as_stored) const override {
    return open_video(bytes, name, threads, as_stored);
  }
  std::string encode_mp4(const uint8_t* rgb, int64_t frames, ImageSize size, const Mp4Config& config,
                         const std::string& name) const override {
    return encode_mp4_bytes(rgb, frames, size, config, name);
  }
};

}  // namespace

void clear_ffmpeg_log() { complaint.clear(); }

std::string reason_of(int error) {
  std::string message;
  std::swap(message, complaint);
  if (!message.empty()) return message;
  std::array<char, AV_ERROR_MAX_STRING_SIZE> text{};
  av_strerror(error, text.data(), text.size());
  return text.data();
}

}  // namespace md

extern "C" const md::VideoLibrary* md_video_library() { return new md::Library; }
