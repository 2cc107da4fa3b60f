#include "maxdiffusion/media/decode_video.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/media/animated_webp.h"
#include "maxdiffusion/media/decode_image.h"

namespace md {
namespace {

/// A frame that is decoded on demand.
class ImageFrame : public VideoFrame {
 public:
  ImageFrame(double time, const Blob& image, const std::string& name, ImageSize size)
      : time_(time), image_(image), name_(name), size_(size) {}
  double time() const override { return time_; }
  void rgb(uint8_t* to) const override {
    const HostArray a = decode_image_bytes(image_.bytes.data(), image_.bytes.size(), name_);
    const ImageSize now{a.dims()[0], a.dims()[1]};
    check(now == size_, Code::io, "{}: its size differs: it has {} pixels, the first image {}", name_, to_string(now),
          to_string(size_));
    std::ranges::copy(a.view<uint8_t>(), to);
  }

 private:
  double time_;
  const Blob& image_;
  std::string name_;
  ImageSize size_;
};

class ImageSequence : public VideoReader {
 public:
  ImageSequence(std::vector<Blob> images, const std::string& name, double fps)
      : images_(std::move(images)), name_(name), fps_(fps) {
    check(!images_.empty(), Code::io, "{}: no images", name);
    const Blob& first = images_[0];
    size_ = decode_stored_image(first.bytes.data(), first.bytes.size(), name_of(0), {.only_size = true}).size;
  }
  ImageSize size() const override { return size_; }
  std::unique_ptr<VideoFrame> next() override {
    if (at_ == images_.size()) return nullptr;
    const size_t i = at_++;
    return std::make_unique<ImageFrame>(static_cast<double>(i) / fps_, images_[i], name_of(i), size_);
  }
  void skip_to(double time) override {
    const double i = std::clamp(std::floor(time * fps_), 0.0, static_cast<double>(images_.size() - 1));
    at_ = std::max(at_, static_cast<size_t>(i));
  }
  std::vector<double> times() const override {
    std::vector<double> all(images_.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<double>(i) / fps_;
    return all;
  }

 private:
  std::string name_of(size_t i) const { return images_.size() == 1 ? name_ : fmt::format("{} image {}", name_, i + 1); }
  std::vector<Blob> images_;
  std::string name_;
  double fps_;
  ImageSize size_;
  size_t at_ = 0;
};

/// GIF and sequences in AVIF are videos.
bool is_image(std::string_view bytes) {
  return has_image_signature(bytes) && !bytes.starts_with("GIF8") && bytes.find("ftypavis") != 4;
}

/// End time of a video. `last`: time of the last frame; `gap`: time since the one before; 0: no other frame, or the
/// same time.
double end_of(double last, double gap, double fps) {
  constexpr double kShown = 0.75;  // fraction of the gap
  return last + kShown * (gap > 0 ? gap : 1 / fps);
}

constexpr double kLongest = 1e9;  // seconds

void check_times(const FrameTimes& t) {
  check(std::isfinite(t.fps) && t.fps >= 0 && t.fps <= 1000, Code::invalid_config, "fps is {}; expected 0 to 1000",
        t.fps);
  check(t.start >= 0 && t.start <= kLongest, Code::invalid_config, "start is {} seconds; expected 0 to {}", t.start,
        kLongest);
}

}  // namespace

std::unique_ptr<VideoReader> open_video(std::string_view bytes, const std::string& name, int threads) {
  check(!bytes.empty(), Code::io, "{}: the file is empty", name);
  if (is_animated_webp(bytes)) return open_animated_webp(bytes, name);
  if (is_image(bytes)) return open_image_sequence({Blob{nullptr, bytes}}, name, 1);
  return video_library().open(bytes, name, threads);
}

std::unique_ptr<VideoReader> open_image_sequence(std::vector<Blob> images, const std::string& name, double fps) {
  return std::make_unique<ImageSequence>(std::move(images), name, fps > 0 ? fps : 1);
}

int64_t each_frame(VideoReader& video, const FrameTimes& times, const std::function<void(const VideoFrame&)>& take) {
  check_times(times);
  if (times.most == 0) return 0;
  if (times.start > 0) video.skip_to(times.start);
  int64_t n = 0;
  std::unique_ptr<VideoFrame> now = video.next();
  if (times.fps == 0) {
    for (; now; now = video.next()) {
      if (now->time() < times.start) continue;
      take(*now);
      if (++n == times.most) break;
    }
    return n;
  }
  constexpr double kEqual = 1e-6;  // seconds
  std::unique_ptr<VideoFrame> after;
  double gap = 0;
  for (; now && n != times.most; ++n) {
    const double t = times.start + static_cast<double>(n) / times.fps;
    while (now->time() < t && (after || (after = video.next()))) {
      if (std::abs(after->time() - t) >= std::abs(now->time() - t) - kEqual) break;
      gap = after->time() - now->time();
      now = std::exchange(after, nullptr);
    }
    if (!after && t >= end_of(now->time(), gap, times.fps)) break;
    take(*now);
  }
  return n;
}

int64_t frames_in(const std::vector<double>& stored, double fps, double start) {
  if (stored.empty()) return 0;
  if (fps == 0) return std::ranges::count_if(stored, [&](double t) { return t >= start; });
  const double last = stored.back(), gap = stored.size() > 1 ? last - stored[stored.size() - 2] : 0;
  const double length = std::clamp(end_of(last, gap, fps) - start, 0.0, kLongest);
  return static_cast<int64_t>(std::ceil(length * fps));
}

HostArray decode_video(std::string_view bytes, const std::string& name, const FrameTimes& times, int threads) {
  const auto video = open_video(bytes, name, threads);
  const int64_t h = video->size().height, w = video->size().width;
  const Shape shape{DType::u8, {h, w, 3}};
  std::vector<HostArray> frames;
  each_frame(*video, times, [&](const VideoFrame& f) {
    check((std::ssize(frames) + 1) * shape.bytes() <= kMaxVideoBytes, Code::io,
          "{}: more than {} frames of {} pixels, {} GB in memory; try: fewer frames, or a part of the video", name,
          frames.size(), to_string(video->size()), kMaxVideoBytes >> 30);
    frames.emplace_back(shape);
    f.rgb(frames.back().mutable_view<uint8_t>().data());
  });
  check(!frames.empty(), Code::io, "{}: there is no frame {} seconds after the first", name, times.start);
  HostArray all(Shape{DType::u8, {std::ssize(frames), h, w, 3}});
  std::byte* to = all.mutable_data();
  for (HostArray& f : frames) {
    to = std::copy_n(f.data(), f.bytes(), to);
    f = {};
  }
  return all;
}

HostArray decode_video(const std::string& file, const FrameTimes& times) {
  const MappedFile m = map_file(file);
  return decode_video({reinterpret_cast<const char*>(m.data), m.size}, file, times);
}

}  // namespace md
