#include "maxdiffusion/media/write_video.h"

#include <algorithm>
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

void check_frames(const HostArray& a, const std::string& name) {
  check(a.dtype() == DType::u8 && a.shape().rank() == 4 && a.dims()[3] == 3 && a.shape().elements() > 0, Code::internal,
        "{}: expected frames u8[F,H,W,3], found {}", name, to_string(a.shape()));
}

/// Frames padded to even sides.
HostArray padded(const HostArray& frames) {
  const int64_t n = frames.dims()[0], h = frames.dims()[1], w = frames.dims()[2], even_h = h + h % 2,
                even_w = w + w % 2;
  if (even_h == h && even_w == w) return frames;
  HostArray out(Shape{DType::u8, {n, even_h, even_w, 3}});
  const uint8_t* from = frames.view<uint8_t>().data();
  uint8_t* to = out.mutable_view<uint8_t>().data();
  for (int64_t i = 0; i < n; ++i)
    for (int64_t y = 0; y < even_h; ++y) {
      const uint8_t* row = from + (i * h + std::min(y, h - 1)) * w * 3;
      to = std::copy_n(row, w * 3, to);
      if (even_w > w) to = std::copy_n(row + (w - 1) * 3, 3, to);
    }
  return out;
}

}  // namespace

std::string encode_mp4(const HostArray& frames, const Mp4Config& config, const std::string& name) {
  check_frames(frames, name);
  check(std::isfinite(config.fps) && config.fps > 0 && config.fps <= 1000, Code::invalid_config,
        "{}: fps is {}; expected more than 0, up to 1000", name, config.fps);
  check(config.quality >= 0 && config.quality <= 51, Code::invalid_config, "{}: quality is {}; expected 0 to 51", name,
        config.quality);
  const HostArray even = padded(frames);
  return video_library().encode_mp4(even.view<uint8_t>().data(), even.dims()[0], {even.dims()[1], even.dims()[2]},
                                    config, name);
}

void write_mp4(const std::string& path, const HostArray& frames, const Mp4Config& config) {
  write_file_atomic(path, encode_mp4(frames, config, path));
}

void write_frames(const std::string& folder, const HostArray& frames) {
  check_frames(frames, folder);
  make_folders(folder);
  parallel_for(frames.dims()[0], [&](int64_t i, int) {
    write_png(fmt::format("{}/{:04}.png", folder, i), without_batch(rows(frames, i, 1)));
  });
}

}  // namespace md
