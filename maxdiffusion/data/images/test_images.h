// Images that tests of data/ share.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/prepare.h"
#include "maxdiffusion/media/image.h"

namespace md {

/// A smooth image whose channels differ.
inline HostArray smooth(int64_t height, int64_t width, int seed = 0) {
  HostArray rgb(Shape{DType::u8, {height, width, 3}});
  auto v = rgb.mutable_view<uint8_t>();
  for (int64_t i = 0; i < static_cast<int64_t>(v.size()); ++i)
    v[static_cast<size_t>(i)] =
        static_cast<uint8_t>((i / 3 % width * 5 + i / 3 / width * 3 + i % 3 * 60 + int64_t{seed} * 31) % 256);
  return rgb;
}
inline ImageConfig in_small_buckets() {
  return {.resolution = 16, .buckets = AspectBuckets({16, 8, 32, 4}), .mask_downscale = 2};
}

/// Four wide images, two tall ones, a square one and one that does not decode.
struct Mixed {
  TemporaryFolder folder;
  Mixed() {
    int n = 0;
    for (const auto& [h, w] : {std::pair{20, 40}, {40, 20}, {16, 16}, {21, 41}, {20, 42}, {39, 20}, {22, 40}}) {
      const std::string stem = folder / std::to_string(n);
      write_png(stem + ".png", smooth(h, w, n));
      write_file_atomic(stem + ".txt", std::to_string(n++));
    }
    write_file_atomic(folder / "bad.png", read_file(folder / "0.png").substr(0, 70));
  }
};

}  // namespace md
