#include "maxdiffusion/media/animated_webp.h"

#include <webp/decode.h>
#include <webp/demux.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/media/decode.h"

namespace md {
namespace {

WebPData data_of(std::string_view bytes) { return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}; }

class Frame : public VideoFrame {
 public:
  Frame(HostArray rgb, double time) : rgb_(std::move(rgb)), time_(time) {}
  double time() const override { return time_; }
  void rgb(uint8_t* to) const override { std::ranges::copy(rgb_.view<uint8_t>(), to); }

 private:
  HostArray rgb_;
  double time_;
};

class Reader : public VideoReader {
 public:
  Reader(std::string_view bytes, const std::string& name) : name_(name) {
    const WebPData data = data_of(bytes);
    WebPAnimDecoderOptions options;
    check(WebPAnimDecoderOptionsInit(&options) != 0, Code::internal,
          "libwebpdemux's version differs from its header's");
    WebPBitstreamFeatures canvas;
    check(WebPGetFeatures(data.bytes, data.size, &canvas) == VP8_STATUS_OK, Code::io, "{}: WebP: corrupt data", name);
    check(int64_t{canvas.height} * canvas.width <= kMaxVideoPixels, Code::io,
          "{}: the header claims {}x{} pixels; expected up to {}", name, canvas.width, canvas.height, kMaxVideoPixels);
    size_ = {canvas.height, canvas.width};
    decoder_.reset(WebPAnimDecoderNew(&data, &options));
    check(decoder_ != nullptr, Code::io, "{}: WebP: the animation is damaged or truncated", name);
    WebPIterator frame;
    int64_t at = 0;  // ms
    for (int ok = WebPDemuxGetFrame(demuxer(), 1, &frame); ok; ok = WebPDemuxNextFrame(&frame)) {
      times_.push_back(static_cast<double>(at) * 1e-3);
      at += frame.duration;
    }
    WebPDemuxReleaseIterator(&frame);
  }
  ImageSize size() const override { return size_; }
  std::unique_ptr<VideoFrame> next() override {
    if (at_ == times_.size()) return nullptr;
    uint8_t* rgba = nullptr;
    int end = 0;
    check(WebPAnimDecoderGetNext(decoder_.get(), &rgba, &end) != 0, Code::io, "{}: frame {} does not decode", name_,
          at_);
    const HostArray canvas(Shape{DType::u8, {size_.height, size_.width, 4}}, nullptr, rgba);
    return std::make_unique<Frame>(from_rgba(canvas, false).rgb, times_[at_++]);
  }
  void skip_to(double) override {}  // each frame is composed over the previous ones
  std::vector<double> times() const override { return times_; }

 private:
  struct Delete {
    void operator()(WebPAnimDecoder* d) const { WebPAnimDecoderDelete(d); }
  };
  const WebPDemuxer* demuxer() const { return WebPAnimDecoderGetDemuxer(decoder_.get()); }
  std::string name_;
  std::unique_ptr<WebPAnimDecoder, Delete> decoder_;
  ImageSize size_;
  std::vector<double> times_;
  size_t at_ = 0;
};

}  // namespace

bool is_animated_webp(std::string_view bytes) {
  WebPBitstreamFeatures features;
  const WebPData data = data_of(bytes);
  return bytes.starts_with("RIFF") && WebPGetFeatures(data.bytes, data.size, &features) == VP8_STATUS_OK &&
         features.has_animation;
}

std::unique_ptr<VideoReader> open_animated_webp(std::string_view bytes, const std::string& name) {
  return std::make_unique<Reader>(bytes, name);
}

}  // namespace md
