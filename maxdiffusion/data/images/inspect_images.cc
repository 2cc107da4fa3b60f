#include "maxdiffusion/data/images/inspect_images.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/data/images/image_rows.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/orientation.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/media/text_raster.h"

namespace md {
namespace {

uint64_t gradients_of(const HostArray& rgb) {
  const HostArray grid = resize_rgb8(rgb, 8, 9);
  const auto v = grid.view<uint8_t>();
  const auto grey = [&](size_t y, size_t x) {
    const size_t at = (y * 9 + x) * 3;
    return 299 * v[at] + 587 * v[at + 1] + 114 * v[at + 2];  // out of 1000
  };
  uint64_t bits = 0;
  for (size_t y = 0; y < 8; ++y)
    for (size_t x = 0; x < 8; ++x) bits = bits << 1 | static_cast<uint64_t>(grey(y, x + 1) > grey(y, x));
  return bits;
}

HostArray filled(int64_t height, int64_t width, uint8_t level) {
  HostArray out(Shape{DType::u8, {height, width, 3}});
  std::ranges::fill(out.mutable_view<uint8_t>(), level);
  return out;
}

void fill_rectangle(HostArray& rgb, int64_t y, int64_t x, int64_t height, int64_t width,
                    const std::array<uint8_t, 3>& colour) {
  const int64_t row = rgb.dims()[1];
  auto v = rgb.mutable_view<uint8_t>();
  for (int64_t i = y; i < y + height; ++i)
    for (int64_t k = x; k < x + width; ++k) std::ranges::copy(colour, v.begin() + (i * row + k) * 3);
}

/// Reduces green and blue where the mask's weight is below its maximum.
void tint_red(HostArray& rgb, const HostArray& mask) {
  const auto weights = mask.view<float>();
  const float most = *std::ranges::max_element(weights);
  if (most <= 0) return;
  const int64_t cell = rgb.dims()[0] / mask.dims()[0], width = rgb.dims()[1];
  auto v = rgb.mutable_view<uint8_t>();
  for (int64_t y = 0; y < rgb.dims()[0]; ++y)
    for (int64_t x = 0; x < width; ++x) {
      const float w = weights[static_cast<size_t>(y / cell * mask.dims()[1] + x / cell)] / most;
      for (int64_t c = 1; c < 3; ++c) {
        uint8_t& level = v[static_cast<size_t>((y * width + x) * 3 + c)];
        level = static_cast<uint8_t>(std::lround(static_cast<float>(level) * (0.3f + 0.7f * w)));
      }
    }
}

}  // namespace

ImageFindings inspect_image(const Record& record, const ImageConfig& config) {
  ImageFindings out{.name = record.name};
  try {
    ImageConfig plain = config;
    plain.mask = MaskFrom::none;
    plain.captions = {};
    plain.references = 0;
    const DecodedImage header = decode_record(record, plain, true);
    out.size = header.size;
    const Fit fit = resize_and_crop(out.size, plain);
    out.enlarged = std::max(static_cast<double>(fit.resized.height) / static_cast<double>(out.size.height),
                            static_cast<double>(fit.resized.width) / static_cast<double>(out.size.width));
    if (!config.clip && !record.image.bytes.empty())
      out.turned = stored_orientation(
                       {reinterpret_cast<const uint8_t*>(record.image.bytes.data()), record.image.bytes.size()}) != 1;
    const HostArray rgb = config.clip ? row_of(prepare_image(record, plain, {}).arrays.at("pixels"), 0)
                                      : decode_record(record, plain).rgb;
    out.gradients = gradients_of(rgb);
    std::ranges::copy(resize_rgb8(rgb, 8, 8).view<uint8_t>(), out.small.begin());
  } catch (const Error& e) {
    if (e.code() != Code::io) throw;
    out.fault = e.message();
  }
  return out;
}

std::vector<std::pair<size_t, size_t>> duplicate_images(const std::vector<ImageFindings>& all) {
  constexpr int kGradients = 3, kMean = 2;
  std::vector<std::pair<size_t, size_t>> out;
  const auto same = [](const ImageFindings& a, const ImageFindings& b) {
    if (std::popcount(a.gradients ^ b.gradients) > kGradients) return false;
    int sum = 0;
    for (size_t i = 0; i < a.small.size(); ++i) sum += std::abs(a.small[i] - b.small[i]);
    return sum <= kMean * static_cast<int>(a.small.size());
  };
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t k = 0; k < i; ++k)
      if (all[i].fault.empty() && all[k].fault.empty() && same(all[k], all[i])) {
        out.emplace_back(k, i);
        break;
      }
  return out;
}

HostArray bucket_chart(const std::vector<ImageSize>& sizes, const std::vector<int64_t>& samples) {
  constexpr int64_t kText = 14, kRow = 20, kLabels = 110, kBars = 420, kNumbers = 80;
  HostArray out = filled(kRow * (std::ssize(sizes) + 1), kLabels + kBars + kNumbers, 255);
  const int64_t most = std::max<int64_t>(1, samples.empty() ? 1 : *std::ranges::max_element(samples));
  draw_text(out, 4, 2, counted(std::ssize(sizes), "bucket"), kText);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t y = kRow * (static_cast<int64_t>(i) + 1);
    const int64_t length = samples[i] == 0 ? 0 : std::max<int64_t>(1, kBars * samples[i] / most);
    fill_rectangle(out, y + 2, kLabels, kRow - 4, length, {70, 110, 180});
    draw_text(out, 4, y + 2, to_string(sizes[i]), kText);
    draw_text(out, kLabels + length + 6, y + 2, std::to_string(samples[i]), kText);
  }
  return out;
}

HostArray seen_by_model(const Record& record, const ImageConfig& config, uint64_t bits, int64_t side) {
  const PreparedImage prepared = prepare_image(record, config, random_placement(config, bits));
  HostArray rgb = prepared.arrays.at("pixels");
  if (config.clip) rgb = row_of(rgb, 0);
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1], longest = std::max(h, w);
  HostArray shown(Shape{DType::u8, {h, w, 3}});
  std::ranges::copy(rgb.view<uint8_t>(), shown.mutable_view<uint8_t>().begin());
  if (const auto mask = prepared.arrays.find("mask"); mask != prepared.arrays.end()) tint_red(shown, mask->second);
  const HostArray fitted =
      resize_rgb8(shown, std::max<int64_t>(1, side * h / longest), std::max<int64_t>(1, side * w / longest));
  HostArray out = filled(side, side, 230);
  const int64_t top = (side - fitted.dims()[0]) / 2, left = (side - fitted.dims()[1]) / 2, row = fitted.dims()[1] * 3;
  for (int64_t y = 0; y < fitted.dims()[0]; ++y)
    std::copy_n(fitted.view<uint8_t>().begin() + y * row, row,
                out.mutable_view<uint8_t>().begin() + ((top + y) * side + left) * 3);
  return out;
}

}  // namespace md
