// Masks, margins and regions, tested with images whose pixels encode their position.
#include "maxdiffusion/pipelines/inpainting.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Pixel = std::array<uint8_t, 3>;

HostArray image(int64_t height, int64_t width, const std::function<Pixel(int64_t y, int64_t x)>& at) {
  HostArray out(Shape{DType::u8, {height, width, 3}});
  auto to = out.mutable_view<uint8_t>().begin();
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) to = std::ranges::copy(at(y, x), to).out;
  return out;
}
Pixel place(int64_t y, int64_t x) { return {static_cast<uint8_t>(10 * y + 5), static_cast<uint8_t>(10 * x + 5), 77}; }
Pixel grey(int v) { return {static_cast<uint8_t>(v), static_cast<uint8_t>(v), static_cast<uint8_t>(v)}; }

void expect_pixels(const HostArray& found, int64_t height, int64_t width,
                   const std::function<Pixel(int64_t y, int64_t x)>& at) {
  ASSERT_EQ(found.dims(), (Dims{height, width, 3}));
  const auto v = found.view<uint8_t>();
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x) {
      const Pixel expected = at(y, x);
      for (size_t c = 0; c < 3; ++c)
        EXPECT_EQ(v[static_cast<size_t>(y * width + x) * 3 + c], expected[c]) << "row " << y << ", column " << x;
    }
}

TEST(Mask, IsWhereGreyIsOneHalfOrMore) {
  // ITU-R 601: red is 76 of 255, green 150, blue 29.
  const Pixel colours[] = {{255, 0, 0}, {0, 255, 0}, {0, 0, 255}, {255, 128, 0}, {0, 128, 255}, grey(127), grey(128)};
  const HostArray mask = mask_of(image(1, 7, [&](int64_t, int64_t x) { return colours[x]; }), 1, 7);
  EXPECT_EQ(mask.to_doubles(), (std::vector<double>{0, 1, 0, 1, 0, 0, 1}));
}

TEST(Mask, GrowsToASquareAndBlursToAGaussian) {
  const HostArray point = image(25, 21, [](int64_t y, int64_t x) { return grey(y == 12 && x == 10 ? 255 : 0); });
  const std::vector<double> grown = mask_of(point, 25, 21, 2).to_doubles(),
                            blurred = mask_of(point, 25, 21, 0, 1.5).to_doubles();
  double sum = 0;
  for (int64_t y = 0; y < 25; ++y)
    for (int64_t x = 0; x < 21; ++x) {
      const auto at = static_cast<size_t>(y * 21 + x);
      EXPECT_EQ(grown[at], std::max(std::abs(y - 12), std::abs(x - 10)) <= 2 ? 1 : 0) << y << ' ' << x;
      const int64_t squared = (y - 12) * (y - 12) + (x - 10) * (x - 10);
      if (squared <= 9) {
        EXPECT_NEAR(blurred[at] / blurred[12 * 21 + 10], std::exp(-static_cast<double>(squared) / (2 * 1.5 * 1.5)),
                    1e-5);
      }
      sum += blurred[at];
    }
  EXPECT_NEAR(sum, 1, 1e-5);
}

TEST(Mask, OfACellIsItsFirstPixelOrTheMeanOfTheMiddle) {
  HostArray hard(Shape{DType::f32, {4, 8}}), soft(Shape{DType::f32, {4, 8}});
  auto v = hard.mutable_view<float>(), w = soft.mutable_view<float>();
  std::ranges::fill(v, 0.0f), std::ranges::fill(w, 0.0f);
  v[0] = 1;                                        // first pixel of the left cell
  v[1 * 8 + 5] = v[2 * 8 + 6] = v[3 * 8 + 7] = 1;  // the right cell: two centre pixels, one corner
  w[0] = 0.5f, w[7] = 1;
  EXPECT_EQ(mask_cells(hard, 4).to_doubles(), (std::vector<double>{1, 0}));
  EXPECT_EQ(mask_cells(hard, 4, true).to_doubles(), (std::vector<double>{0, 0.5}));
  for (const bool middle : {false, true})
    EXPECT_EQ(mask_cells(soft, 4, middle).to_doubles(), (std::vector<double>{0.5 / 16, 1.0 / 16}));
}

TEST(Margins, RepeatTheImagesSidesUnderWhiteOfTheMask) {
  const Margins margins{.left = 2, .top = 1, .right = 4, .bottom = 3};
  const HostArray small = image(2, 3, place);
  expect_pixels(extended(small, margins), 6, 9, [](int64_t y, int64_t x) {
    return place(std::clamp<int64_t>(y - 1, 0, 1), std::clamp<int64_t>(x - 2, 0, 2));
  });
  const auto inside = [](int64_t y, int64_t x) { return y >= 1 && y < 3 && x >= 2 && x < 5; };
  expect_pixels(extended_mask({}, small, margins), 6, 9,
                [&](int64_t y, int64_t x) { return grey(inside(y, x) ? 0 : 255); });
  expect_pixels(extended_mask(image(2, 3, place), small, margins), 6, 9,
                [&](int64_t y, int64_t x) { return inside(y, x) ? place(y - 1, x - 2) : grey(255); });
  // A mask of another size is resized to the image.
  expect_pixels(extended_mask(image(7, 5, [](int64_t, int64_t) { return grey(40); }), small, margins), 6, 9,
                [&](int64_t y, int64_t x) { return grey(inside(y, x) ? 40 : 255); });
}

TEST(Region, IsTheMasksBoxWithItsPadInTheProportionsOfTheSample) {
  const auto region = [](int64_t x1, int64_t y1, int64_t x2, int64_t y2, int64_t pad, int64_t height, int64_t width) {
    const HostArray mask = image(40, 60, [=](int64_t y, int64_t x) {
      return grey(x >= x1 && x < x2 && y >= y1 && y < y2 ? 1 : 0);  // not black
    });
    const Region r = region_around(mask, pad, height, width);
    return std::vector<int64_t>{r.x, r.y, r.width, r.height};
  };
  EXPECT_EQ(region(20, 10, 30, 18, 2, 32, 32), (std::vector<int64_t>{18, 7, 14, 14}));
  EXPECT_EQ(region(20, 10, 30, 18, 0, 32, 64), (std::vector<int64_t>{17, 10, 16, 8}));
  EXPECT_EQ(region(50, 0, 60, 8, 3, 32, 32), (std::vector<int64_t>{47, 0, 13, 13}));  // moved inside the image
  EXPECT_EQ(region(0, 10, 60, 18, 0, 32, 32), (std::vector<int64_t>{0, 0, 60, 40}));  // the whole image
  EXPECT_THROW(region(0, 0, 0, 0, 5, 32, 32), Error);
}

TEST(Region, OfOtherProportionsIsInTheMiddleAndPutBackFromThere) {
  const HostArray whole = image(12, 12, place);
  const HostArray made = image(8, 8, [](int64_t y, int64_t x) { return Pixel{200, place(y, x)[0], place(y, x)[1]}; });
  const HostArray white = image(12, 12, [](int64_t, int64_t) { return grey(255); });
  for (const bool wide : {true, false}) {
    const Region r = wide ? Region{1, 2, 8, 3} : Region{2, 1, 3, 8};
    const int64_t left = wide ? 0 : 3, top = wide ? 3 : 0;  // 3 of 8 on the left or top, centred
    expect_pixels(fitted(whole, r, 8, 8), 8, 8, [&](int64_t y, int64_t x) {
      return place(r.y + std::clamp<int64_t>(y - top, 0, r.height - 1),
                   r.x + std::clamp<int64_t>(x - left, 0, r.width - 1));
    });
    const auto inside = [&](int64_t y, int64_t x) {
      return y >= r.y && y < r.y + r.height && x >= r.x && x < r.x + r.width;
    };
    expect_pixels(put_back(whole, white, r, made), 12, 12, [&](int64_t y, int64_t x) {
      if (!inside(y, x)) return place(y, x);
      const Pixel p = place(y - r.y + top, x - r.x + left);
      return Pixel{200, p[0], p[1]};
    });
  }
}

TEST(Region, IsAsOpaqueAsTheMaskIsWhite) {
  const int levels[] = {0, 51, 128, 255};
  const HostArray old = image(1, 4, [](int64_t, int64_t) { return grey(100); }),
                  mask = image(1, 4, [&](int64_t, int64_t x) { return grey(levels[x]); }),
                  made = image(1, 4, [](int64_t, int64_t) { return grey(200); });
  const int expected[] = {100, 120, 150, 200};
  expect_pixels(put_back(old, mask, {0, 0, 4, 1}, made), 1, 4, [&](int64_t, int64_t x) { return grey(expected[x]); });
}

}  // namespace
}  // namespace md
