// Demuxing and decoding. Source: FFmpeg's documentation of libavformat and libavcodec (send/receive).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "maxdiffusion/media/libav/libav.h"

namespace md {
namespace {

constexpr const char* kFormats = "mov,matroska,gif,avi,bmp_pipe,tiff_pipe";  // none that refers to files
constexpr const char* kNames = "mp4, mov, mkv, webm, avi or gif";

/// A demuxer over bytes in memory, and its video stream.
class Input {
 public:
  Input(std::string_view bytes, const std::string& name) : memory_{bytes} {
    clear_ffmpeg_log();
    constexpr int kBuffer = 1 << 16;
    io_.reset(avio_alloc_context(static_cast<uint8_t*>(av_malloc(kBuffer)), kBuffer, 0, &memory_, read, nullptr, seek));
    AVFormatContext* format = avformat_alloc_context();
    check(io_ && format, Code::out_of_memory, "{}: no memory for a demuxer", name);
    format->pb = io_.get();
    format->io_open = [](AVFormatContext*, AVIOContext**, const char*, int, AVDictionary**) { return AVERROR(EPERM); };
    format->format_whitelist = av_strdup(kFormats);
    const int opened = avformat_open_input(&format, nullptr, nullptr, nullptr);  // frees `format` on failure
    if (opened < 0) fail(Code::io, "{}: not a video ({}), or damaged: {}", name, kNames, reason_of(opened));
    format_.reset(format);
    require(avformat_find_stream_info(format, nullptr), name, "what its streams are");
    const int index = av_find_best_stream(format, AVMEDIA_TYPE_VIDEO, -1, -1, nullptr, 0);
    if (index < 0 || (format->streams[index]->disposition & AV_DISPOSITION_ATTACHED_PIC)) {
      std::string others;
      for (unsigned i = 0; i < format->nb_streams; ++i) {
        const char* type = av_get_media_type_string(format->streams[i]->codecpar->codec_type);
        others += (others.empty() ? "" : ", ") + std::string(type ? type : "data");
      }
      fail(Code::io, "{}: no video stream; its streams: {}", name, others.empty() ? "none" : others);
    }
    for (unsigned i = 0; i < format->nb_streams; ++i)
      if (static_cast<int>(i) != index) format->streams[i]->discard = AVDISCARD_ALL;
    stream_ = format->streams[index];
  }
  AVFormatContext* format() const { return format_.get(); }
  AVStream* stream() const { return stream_; }
  /// The next packet of the stream; false at the end.
  bool read_packet(AVPacket* packet, const std::string& name) {
    for (;;) {
      av_packet_unref(packet);
      const int r = av_read_frame(format(), packet);
      if (r == AVERROR_EOF) return false;
      require(r, name, "reading");
      if (packet->stream_index == stream_->index) return true;
    }
  }

 private:
  struct Memory {
    std::string_view bytes;
    int64_t at = 0;
  };
  static int read(void* opaque, uint8_t* to, int size) {
    auto& m = *static_cast<Memory*>(opaque);
    const int64_t n = std::min<int64_t>(size, std::ssize(m.bytes) - m.at);
    if (n <= 0) return AVERROR_EOF;
    std::memcpy(to, m.bytes.data() + m.at, static_cast<size_t>(n));
    m.at += n;
    return static_cast<int>(n);
  }
  static int64_t seek(void* opaque, int64_t offset, int whence) {
    auto& m = *static_cast<Memory*>(opaque);
    const int64_t size = std::ssize(m.bytes);
    if (whence & AVSEEK_SIZE) return size;
    whence &= ~AVSEEK_FORCE;
    const int64_t to = offset + (whence == SEEK_CUR ? m.at : whence == SEEK_END ? size : 0);
    if (to < 0 || to > size) return AVERROR(EINVAL);
    return m.at = to;
  }
  Memory memory_;
  IoPtr io_;
  InputPtr format_;
  AVStream* stream_ = nullptr;
};

/// Decoded frames → u8 [H, W, 3].
class Converter {
 public:
  Converter(const std::string& name, ImageSize upright, int turns) : name_(name), upright_(upright), turns_(turns) {}
  void convert(const AVFrame& from, uint8_t* to) {
    const auto format = static_cast<AVPixelFormat>(from.format);
    const AVPixFmtDescriptor* what = av_pix_fmt_desc_get(format);
    const bool alpha = what && (what->flags & AV_PIX_FMT_FLAG_ALPHA);
    const bool on_side = turns_ % 2 == 1;
    const int w = static_cast<int>(on_side ? upright_.height : upright_.width),
              h = static_cast<int>(on_side ? upright_.width : upright_.height);
    scaler_.reset(sws_getCachedContext(
        scaler_.release(), from.width, from.height, format, w, h, alpha ? AV_PIX_FMT_RGBA : AV_PIX_FMT_RGB24,
        SWS_BICUBIC | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT | SWS_BITEXACT, nullptr, nullptr, nullptr));
    check(scaler_ != nullptr, Code::io, "{}: frames of pixel format {} cannot be read", name_,
          what ? what->name : "unknown");
    // Colour space of the frame; default BT.601, as in FFmpeg's tools.
    const bool full = from.color_range == AVCOL_RANGE_JPEG;
    sws_setColorspaceDetails(scaler_.get(), sws_getCoefficients(from.colorspace), full,
                             sws_getCoefficients(SWS_CS_DEFAULT), 1, 0, 1 << 16, 1 << 16);
    if (!rgb_ || rgb_->width != w || rgb_->height != h ||
        rgb_->format != (alpha ? AV_PIX_FMT_RGBA : AV_PIX_FMT_RGB24)) {
      rgb_.reset(av_frame_alloc());
      check(rgb_ != nullptr, Code::out_of_memory, "{}: no memory for a frame", name_);
      rgb_->width = w, rgb_->height = h, rgb_->format = alpha ? AV_PIX_FMT_RGBA : AV_PIX_FMT_RGB24;
      require(av_frame_get_buffer(rgb_.get(), 0), name_, "memory of a frame");
    }
    require(sws_scale(scaler_.get(), from.data, from.linesize, 0, from.height, rgb_->data, rgb_->linesize), name_,
            "colours");
    if (turns_ == 0 && !alpha) {
      for (int64_t y = 0; y < h; ++y) to = std::copy_n(rgb_->data[0] + y * rgb_->linesize[0], int64_t{w} * 3, to);
      return;
    }
    for (int64_t y = 0; y < upright_.height; ++y)
      for (int64_t x = 0; x < upright_.width; ++x, to += 3) place(y, x, alpha, to);
  }

 private:
  void place(int64_t y, int64_t x, bool alpha, uint8_t* to) const {
    // Position of the upright pixel in the stored image, which is rotated clockwise by turns_ quarters.
    const int64_t last_y = rgb_->height - 1, last_x = rgb_->width - 1;
    const auto [row, column] = turns_ == 0   ? std::pair(y, x)
                               : turns_ == 1 ? std::pair(last_y - x, y)
                               : turns_ == 2 ? std::pair(last_y - y, last_x - x)
                                             : std::pair(x, last_x - y);
    const uint8_t* from = rgb_->data[0] + row * rgb_->linesize[0] + column * (alpha ? 4 : 3);
    const int opaque = alpha ? from[3] : 255;
    for (int c = 0; c < 3; ++c) to[c] = static_cast<uint8_t>((from[c] * opaque + 255 * (255 - opaque) + 127) / 255);
  }
  const std::string& name_;
  ImageSize upright_;
  int turns_;
  ScalerPtr scaler_;
  FramePtr rgb_;
};

class Frame : public VideoFrame {
 public:
  Frame(FramePtr frame, double time, Converter& converter)
      : frame_(std::move(frame)), time_(time), converter_(converter) {}
  double time() const override { return time_; }
  void rgb(uint8_t* to) const override { converter_.convert(*frame_, to); }

 private:
  FramePtr frame_;
  double time_;
  Converter& converter_;
};

class Reader : public VideoReader {
 public:
  Reader(std::string_view bytes, const std::string& name, int threads, bool as_stored)
      : bytes_(bytes), name_(name), threads_(threads) {
    start();
    const AVFrame& f = *ahead_;
    stored_ = {f.height, f.width};
    const AVRational pixel = av_guess_sample_aspect_ratio(input_->format(), input_->stream(), ahead_.get());
    const double aspect = pixel.num > 0 && pixel.den > 0 ? av_q2d(pixel) : 1;
    ImageSize upright = stored_;
    if (aspect > 0.25 && aspect < 4) upright.width = std::max<int64_t>(1, std::lround(f.width * aspect));
    const int turns = as_stored ? 0 : quarter_turns();
    if (turns % 2 == 1) std::swap(upright.width, upright.height);
    size_ = upright;
    converter_ = std::make_unique<Converter>(name_, upright, turns);
  }
  ImageSize size() const override { return size_; }
  std::unique_ptr<VideoFrame> next() override {
    FramePtr frame = std::move(ahead_);
    if (!frame) frame = decode(false);
    if (!frame) return nullptr;
    const ImageSize now{frame->height, frame->width};
    check(now == stored_, Code::io, "{}: the size changes: frame {} has {}x{} pixels, those before {}x{}", name_,
          count_, now.width, now.height, stored_.width, stored_.height);
    ++count_;
    time_ = time_of(*frame);
    return std::make_unique<Frame>(std::move(frame), time_, *converter_);
  }
  void skip_to(double time) override {
    constexpr double kNear = 1;  // seconds; decoding them is as fast as seeking
    if (time <= time_ + kNear) return;
    const int64_t to = first_ + static_cast<int64_t>(time / av_q2d(input_->stream()->time_base));
    if (avformat_seek_file(input_->format(), input_->stream()->index, std::numeric_limits<int64_t>::min(), to, to, 0) >=
        0) {
      avcodec_flush_buffers(codec_.get());
      drained_ = false;
      ahead_ = decode(true);
    }
    if (!ahead_ || time_of(*ahead_) > time) start();
  }
  std::vector<double> times() const override {
    Input input(bytes_, name_);
    const PacketPtr packet(av_packet_alloc());
    std::vector<double> all;
    while (input.read_packet(packet.get(), name_)) {
      const int64_t t = packet->pts == AV_NOPTS_VALUE ? packet->dts : packet->pts;
      if (packet->flags & AV_PKT_FLAG_DISCARD) continue;
      all.push_back(t == AV_NOPTS_VALUE ? static_cast<double>(all.size()) * default_gap()
                                        : static_cast<double>(t) * av_q2d(input.stream()->time_base));
    }
    std::ranges::sort(all);
    if (!all.empty())
      for (const double first = all[0]; double& t : all) t -= first;
    return all;
  }

 private:
  /// Opens the video and decodes its first frame.
  void start() {
    ahead_.reset();
    codec_.reset();
    input_ = std::make_unique<Input>(bytes_, name_);
    const AVCodecParameters& p = *input_->stream()->codecpar;
    check(int64_t{p.width} * p.height <= kMaxVideoPixels, Code::io,
          "{}: the header claims {}x{} pixels; expected up to {}", name_, p.width, p.height, kMaxVideoPixels);
    const AVCodec* decoder = avcodec_find_decoder(p.codec_id);
    check(decoder != nullptr, Code::io, "{}: there is no decoder for {}", name_, avcodec_get_name(p.codec_id));
    codec_.reset(avcodec_alloc_context3(decoder));
    check(codec_ != nullptr, Code::out_of_memory, "{}: no memory for a decoder", name_);
    require(avcodec_parameters_to_context(codec_.get(), &p), name_, "the decoder");
    codec_->pkt_timebase = input_->stream()->time_base;
    codec_->thread_count = threads_;
    codec_->max_pixels = kMaxVideoPixels;
    require(avcodec_open2(codec_.get(), decoder, nullptr), name_, "the decoder");
    drained_ = false;
    count_ = 0, time_ = 0, first_ = AV_NOPTS_VALUE;
    ahead_ = decode(false);
    check(ahead_ != nullptr, Code::io, "{}: no frame decodes", name_);
    first_ = ahead_->best_effort_timestamp;
  }
  double default_gap() const {
    const AVRational rate = input_->stream()->avg_frame_rate;
    return rate.num > 0 && rate.den > 0 ? 1 / av_q2d(rate) : 1.0 / 25;
  }
  double time_of(const AVFrame& f) const {
    if (f.best_effort_timestamp == AV_NOPTS_VALUE || first_ == AV_NOPTS_VALUE)
      return static_cast<double>(count_) * default_gap();
    return static_cast<double>(f.best_effort_timestamp - first_) * av_q2d(input_->stream()->time_base);
  }
  int quarter_turns() const {
    const uint8_t* matrix = av_stream_get_side_data(input_->stream(), AV_PKT_DATA_DISPLAYMATRIX, nullptr);
    if (!matrix) return 0;
    // Counterclockwise rotation of the stored image for display, in degrees.
    const double degrees = av_display_rotation_get(reinterpret_cast<const int32_t*>(matrix));
    if (std::isnan(degrees)) return 0;
    return static_cast<int>(((std::lround(-degrees / 90) % 4) + 4) % 4);
  }
  [[noreturn]] void broken(const std::string& why) const {
    fail(Code::io, "{}: frame {} does not decode: {}", name_, count_, why);
  }
  /// The next frame; null at the end. `tolerant`: skips frames that do not decode before the first good one, as after a
  /// seek.
  FramePtr decode(bool tolerant) {
    clear_ffmpeg_log();
    FramePtr frame(av_frame_alloc());
    const PacketPtr packet(av_packet_alloc());
    check(frame && packet, Code::out_of_memory, "{}: no memory for a frame", name_);
    for (;;) {
      int r = avcodec_receive_frame(codec_.get(), frame.get());
      if (r == 0) {
        const bool whole = !(frame->flags & AV_FRAME_FLAG_CORRUPT) && frame->decode_error_flags == 0;
        if (whole) return frame;
        if (!tolerant) broken(reason_of(AVERROR_INVALIDDATA));
        av_frame_unref(frame.get());
        continue;
      }
      if (r == AVERROR_EOF) return nullptr;
      if (r != AVERROR(EAGAIN) && !tolerant) broken(reason_of(r));
      if (!input_->read_packet(packet.get(), name_)) {
        if (drained_) return nullptr;
        drained_ = true;
        avcodec_send_packet(codec_.get(), nullptr);
        continue;
      }
      if ((packet->flags & AV_PKT_FLAG_CORRUPT) && !tolerant) broken("the file is truncated");
      r = avcodec_send_packet(codec_.get(), packet.get());
      if (r < 0 && !tolerant) broken(reason_of(r));
    }
  }

  std::string_view bytes_;
  const std::string name_;
  int threads_;
  std::unique_ptr<Input> input_;
  CodecPtr codec_;
  FramePtr ahead_;  // decoded, not yet returned
  ImageSize stored_, size_;
  std::unique_ptr<Converter> converter_;
  int64_t first_ = AV_NOPTS_VALUE, count_ = 0;
  double time_ = 0;  // of the last returned frame
  bool drained_ = false;
};

}  // namespace

std::unique_ptr<VideoReader> open_video(std::string_view bytes, const std::string& name, int threads, bool as_stored) {
  return std::make_unique<Reader>(bytes, name, threads, as_stored);
}

}  // namespace md
