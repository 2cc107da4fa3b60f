// Pictures that nobody drew, for trials without data: soft colour gradients, another for each number.
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/shuffle.h"

namespace md {
namespace {

class Synthetic : public RecordSource {
 public:
  Synthetic(int64_t samples, int64_t resolution)
      : RecordSource("synthetic pictures", fmt::format("synthetic {} {}", samples, resolution)),
        samples_(samples),
        resolution_(resolution) {}
  int64_t size() const override { return samples_; }
  Record read(int64_t index) const override {
    Record r{.name = fmt::format("synthetic picture {}", index), .caption = fmt::format("synthetic picture {}", index)};
    r.pixels = HostArray(Shape{DType::u8, {resolution_, resolution_, 3}});
    auto v = r.pixels.mutable_view<uint8_t>();
    uint64_t bits = mix(static_cast<uint64_t>(index));
    float from[3], dx[3], dy[3];
    for (int c = 0; c < 3; ++c) {
      const auto draw = [&] { return static_cast<float>((bits = mix(bits)) >> 40) / static_cast<float>(1 << 24); };
      from[c] = 255 * draw(), dx[c] = 255 * draw() - from[c], dy[c] = 255 * draw() - from[c];
    }
    const auto n = static_cast<size_t>(resolution_);
    for (size_t y = 0; y < n; ++y) {
      for (size_t x = 0; x < n; ++x) {
        const float u = static_cast<float>(x) / static_cast<float>(n),
                    w = static_cast<float>(y) / static_cast<float>(n);
        for (size_t c = 0; c < 3; ++c)
          v[(y * n + x) * 3 + c] = static_cast<uint8_t>(std::lround(from[c] + (dx[c] * u + dy[c] * w) / 2));
      }
    }
    return r;
  }

 private:
  int64_t samples_, resolution_;
};

}  // namespace

SourcePtr synthetic_source(const DataSourceConfig& config) {
  check(config.array_columns.empty(), Code::invalid_config,
        "dataset_type synthetic makes pictures and captions; cached arrays are read from tfrecord, grain and hf");
  check(config.synthetic_num_samples > 0 && config.resolution > 0, Code::invalid_config,
        "dataset_type synthetic: {} samples of {} pixels; expected > 0", config.synthetic_num_samples,
        config.resolution);
  return std::make_shared<Synthetic>(config.synthetic_num_samples, config.resolution);
}

}  // namespace md
