// Videos that tests of data/ share.
#pragma once

#include <cstdint>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// u8 [F, H, W, 3]: frame i is grey of level `first` + i * `step`, with a brighter top left quarter.
inline HostArray grey_frames(int64_t frames, int64_t height, int64_t width, int first = 16, int step = 6) {
  HostArray a(Shape{DType::u8, {frames, height, width, 3}});
  uint8_t* to = a.mutable_view<uint8_t>().data();
  for (int64_t i = 0; i < frames; ++i)
    for (int64_t y = 0; y < height; ++y)
      for (int64_t x = 0; x < width; ++x)
        for (int c = 0; c < 3; ++c)
          *to++ = static_cast<uint8_t>(first + i * step + (y < height / 2 && x < width / 2 ? 30 : 0));
  return a;
}
/// The number in grey_frames of each of these frames.
inline std::vector<int64_t> numbers_of(const HostArray& frames, int first = 16, int step = 6) {
  std::vector<int64_t> numbers;
  const int64_t stride = frames.dims()[1] * frames.dims()[2] * 3;
  for (int64_t i = 0; i < frames.dims()[0]; ++i) {
    const int level = frames.view<uint8_t>()[static_cast<size_t>((i + 1) * stride - 1)];  // bottom right
    numbers.push_back((level - first + step / 2) / step);
  }
  return numbers;
}

}  // namespace md
