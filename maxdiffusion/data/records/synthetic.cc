// For tests without data: generated images with soft colour gradients, clips in which the gradient moves, or random
// arrays of the shapes that encoders return; each number gives another sample.
#include <cmath>
#include <numbers>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/data/records/kinds.h"
#include "maxdiffusion/data/records/shuffle.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

class Synthetic : public RecordSource {
 public:
  Synthetic(int64_t samples, int64_t resolution, int64_t frames, size_t references)
      : RecordSource(frames > 0 ? "synthetic clips" : "synthetic images",
                     fmt::format("synthetic {} {}", samples, resolution) +
                         (frames > 0 ? fmt::format(" of {} frames", frames) : "") +
                         (references > 0 ? fmt::format(" from {}", references) : "")),
        samples_(samples),
        resolution_(resolution),
        frames_(frames),
        references_(references) {}
  bool captions_are_counted() const override { return true; }
  int64_t size() const override { return samples_; }
  Record read(int64_t index) const override {
    Record r{.name = fmt::format("synthetic {} {}", frames_ > 0 ? "clip" : "image", index),
             .caption = fmt::format("synthetic picture {}", index)};
    if (frames_ == 0) r.pixels = gradient(index);
    for (int64_t i = 0; i < frames_; ++i)
      r.frames.push_back(
          Blob::of(encode_png(gradient(index, static_cast<float>(i) / static_cast<float>(2 * frames_)))));
    for (size_t i = 0; i < references_; ++i)
      r.references.push_back(Blob::of(encode_png(gradient(~(index + samples_ * static_cast<int64_t>(i))))));
    return r;
  }

 private:
  /// `shift`: of the gradient to the right, in widths of the image.
  HostArray gradient(int64_t number, float shift = 0) const {
    HostArray rgb(Shape{DType::u8, {resolution_, resolution_, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    uint64_t bits = mix(static_cast<uint64_t>(number));
    float from[3], dx[3], dy[3];
    for (int c = 0; c < 3; ++c) {
      const auto uniform = [&] { return static_cast<float>((bits = mix(bits)) >> 40) / static_cast<float>(1 << 24); };
      from[c] = 255 * uniform(), dx[c] = 255 * uniform() - from[c], dy[c] = 255 * uniform() - from[c];
    }
    const auto n = static_cast<size_t>(resolution_);
    for (size_t y = 0; y < n; ++y) {
      for (size_t x = 0; x < n; ++x) {
        const float u = std::abs(static_cast<float>(x) / static_cast<float>(n) - shift),
                    w = static_cast<float>(y) / static_cast<float>(n);
        for (size_t c = 0; c < 3; ++c)
          v[(y * n + x) * 3 + c] = static_cast<uint8_t>(std::lround(from[c] + (dx[c] * u + dy[c] * w) / 2));
      }
    }
    return rgb;
  }

  int64_t samples_, resolution_, frames_;
  size_t references_;
};

/// Standard normal numbers: two from each pair of uniform numbers. Source: Box and Muller 1958.
HostArray normal_numbers(const Dims& dims, uint64_t key) {
  HostArray out(Shape{DType::f32, dims});
  auto v = out.mutable_view<float>();
  const auto uniform = [&](uint64_t i) { return (static_cast<double>(mix(key ^ i) >> 11) + 1) / 9007199254740993.0; };
  for (size_t i = 0; i < v.size(); i += 2) {
    const double radius = std::sqrt(-2 * std::log(uniform(i))), angle = 2 * std::numbers::pi * uniform(i + 1);
    v[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < v.size()) v[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return out;
}

struct Arrays {
  std::map<std::string, Shape> shapes;
  uint64_t seed;
  Record record(int64_t index) const {
    Record r{.name = fmt::format("synthetic sample {}", index)};
    uint64_t key = mix(mix(~seed) ^ static_cast<uint64_t>(index));
    for (const auto& [name, shape] : shapes) {
      key = mix(key);
      r.arrays[name] =
          is_float(shape.dtype) ? normal_numbers(shape.dims, key).cast(shape.dtype) : zeros_like(HostArray(shape));
    }
    return r;
  }
};

class SyntheticArrays : public RecordSource {
 public:
  SyntheticArrays(Arrays arrays, std::optional<int64_t> samples)
      : RecordSource("synthetic samples", "synthetic"),
        arrays_(std::make_shared<const Arrays>(std::move(arrays))),
        samples_(samples) {}
  int64_t size() const override { return samples_.value_or(-1); }
  int64_t shards() const override { return samples_ ? 0 : 1; }
  Record read(int64_t index) const override { return arrays_->record(index); }
  std::unique_ptr<ShardReader> open(int64_t, int64_t offset) const override {
    struct Endless : ShardReader {
      std::shared_ptr<const Arrays> arrays;
      int64_t at = 0;
      std::optional<PendingRecord> next() override {
        return [all = arrays, i = at++] { return all->record(i); };
      }
      int64_t offset() const override { return at; }
    };
    auto reader = std::make_unique<Endless>();
    reader->arrays = arrays_;
    reader->at = offset;
    return reader;
  }

 private:
  std::shared_ptr<const Arrays> arrays_;
  std::optional<int64_t> samples_;
};

}  // namespace

SourcePtr synthetic_source(const std::string& /*where*/, const DataSourceConfig& config) {
  if (!config.synthetic_arrays.empty()) {
    check(config.synthetic_num_samples.value_or(1) > 0, Code::invalid_config,
          "synthetic_num_samples is {}; expected more than 0, or null", config.synthetic_num_samples.value_or(0));
    return std::make_shared<SyntheticArrays>(Arrays{config.synthetic_arrays, config.synthetic_seed},
                                             config.synthetic_num_samples);
  }
  check(config.array_columns.empty(), Code::invalid_config,
        "dataset_type is synthetic, which makes images and captions; encoded samples are read from tfrecord, grain or "
        "hf");
  const int64_t samples = config.synthetic_num_samples.value_or(1000);
  check(samples > 0 && config.resolution > 0, Code::invalid_config,
        "dataset_type synthetic: {} samples of {} pixels; expected > 0", samples, config.resolution);
  return std::make_shared<Synthetic>(samples, config.resolution, config.synthetic_frames,
                                     config.reference_columns().size());
}

}  // namespace md
