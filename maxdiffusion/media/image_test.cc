#include "maxdiffusion/media/image.h"

#include <gtest/gtest.h>
#include <png.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/media/text_raster.h"

namespace md {
namespace {

HostArray filled(int64_t h, int64_t w, std::array<uint8_t, 3> colour) {
  HostArray a(Shape{DType::u8, {h, w, 3}});
  auto v = a.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = colour[i % 3];
  return a;
}
const uint8_t* at(const HostArray& a, int64_t y, int64_t x) {
  return &a.view<uint8_t>()[static_cast<size_t>((y * a.dims()[1] + x) * 3)];
}
int64_t dark_pixels(const HostArray& a, int64_t from_y, int64_t to_y) {
  int64_t n = 0;
  for (int64_t y = from_y; y < to_y; ++y) {
    for (int64_t x = 0; x < a.dims()[1]; ++x) n += at(a, y, x)[1] < 128;
  }
  return n;
}

TEST(Image, PngHoldsTheVeryPixels) {
  HostArray a(Shape{DType::u8, {5, 7, 3}});
  auto v = a.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(i * 37);
  const TemporaryFolder folder;
  const std::string path = folder / "pixels.png";
  write_png(path, a);
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  ASSERT_TRUE(png_image_begin_read_from_file(&image, path.c_str()));
  image.format = PNG_FORMAT_RGB;
  ASSERT_EQ(image.height, 5u);
  ASSERT_EQ(image.width, 7u);
  std::vector<uint8_t> back(PNG_IMAGE_SIZE(image));
  ASSERT_TRUE(png_image_finish_read(&image, nullptr, back.data(), 0, nullptr));
  EXPECT_EQ(std::memcmp(back.data(), a.data(), a.bytes()), 0);
  EXPECT_EQ(encode_png(a), read_file(path));
}

TEST(Image, FileHasTheTextsOfTheImage) {
  const HostArray a = filled(2, 2, {1, 2, 3});
  const std::string bytes = encode_png(a, {{"parameters", "ein Kätzchen\nSteps: 3"}});
  // Keyword, no compression, no language, no translated keyword, text.
  EXPECT_NE(bytes.find(std::string("iTXtparameters\0\0\0\0\0", 19) + "ein Kätzchen\nSteps: 3"), std::string::npos);
  EXPECT_EQ(encode_png(a).find("iTXt"), std::string::npos);
}

TEST(Image, TextsBehindThePixelsAreReadToo) {
  const PngTexts texts = {{"parameters", "a cat\nSteps: 3"}};
  std::string bytes = encode_png(filled(2, 2, {1, 2, 3}), texts);
  const size_t from = bytes.find("iTXt") - 4, n = static_cast<uint8_t>(bytes[from + 3]) + size_t{12};
  const std::string chunk = bytes.substr(from, n);
  bytes.erase(from, n);
  bytes.insert(bytes.find("IEND") - 4, chunk);
  const auto read = [](const std::string& b) {
    return png_texts({reinterpret_cast<const uint8_t*>(b.data()), b.size()}, "x.png");
  };
  EXPECT_EQ(read(bytes), texts);
  EXPECT_EQ(read(bytes.substr(0, bytes.find("IEND") - 5)), PngTexts());  // the text is cut off
}

TEST(Image, TextsInLatin1AreReadAsUtf8AndThoseInUtf8AsTheyAre) {
  const auto read = [](const std::string& value) {
    std::string chunk = std::string("tEXtparameters", 14) + '\0' + value;
    uint32_t crc = 0xffffffff;
    for (const char c : chunk) {
      crc ^= static_cast<unsigned char>(c);
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
    }
    crc = ~crc;
    const auto number = [](uint32_t n) {
      return std::string{static_cast<char>(n >> 24), static_cast<char>(n >> 16), static_cast<char>(n >> 8),
                         static_cast<char>(n)};
    };
    std::string b = encode_png(filled(2, 2, {1, 2, 3}));
    b.insert(b.find("IDAT") - 4, number(static_cast<uint32_t>(chunk.size() - 4)) + chunk + number(crc));
    return png_texts({reinterpret_cast<const uint8_t*>(b.data()), b.size()}, "x.png").at("parameters");
  };
  EXPECT_EQ(read("caf\xe9"), "café");
  EXPECT_EQ(read("café 猫"), "café 猫");
  EXPECT_EQ(read("\xff\xe9"), "ÿé");
}

TEST(Image, WritingToAMissingFolderIsRefused) {
  EXPECT_THROW(write_png("/nowhere/at/all.png", filled(2, 2, {1, 2, 3})), Error);
}

TEST(Image, OnlyRgbIsWritten) { EXPECT_THROW(encode_png(HostArray(Shape{DType::u8, {4, 4, 4}})), Error); }

TEST(Image, FloatsAreClippedAndRounded) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> v{-2.0f,   -1.0f, 0.0f, 1.0f, 3.0f, nan, -1.0f + 1.0f / 127.5f, -1.0f + 1.4f / 127.5f,
                             INFINITY};
  const HostArray out = to_rgb8(HostArray::of<float>(Shape{DType::f32, {1, 3, 3}}, v));
  const auto u = out.view<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(u.begin(), u.end()), (std::vector<uint8_t>{0, 0, 128, 255, 255, 0, 1, 1, 255}));
}

TEST(Grid, ImagesAreInEnlargedRows) {
  const std::vector<GridCell> cells{
      {filled(4, 4, {255, 0, 0}), ""}, {filled(4, 4, {0, 255, 0}), ""}, {filled(4, 4, {0, 0, 255}), ""}};
  const HostArray g = make_grid(cells, 2, 8);
  EXPECT_EQ(g.dims(), (Dims{3 * 6 + 2 * 32, 3 * 6 + 2 * 32, 3}));
  EXPECT_EQ(at(g, 0, 0)[2], 255);  // gap
  EXPECT_EQ(at(g, 6, 6)[1], 0);    // red
  EXPECT_EQ(at(g, 37, 37)[0], 255);
  EXPECT_EQ(at(g, 38, 38)[1], 255);  // gap again
  EXPECT_EQ(at(g, 6, 44)[0], 0);     // green
  EXPECT_EQ(at(g, 44, 6)[2], 255);   // blue
  EXPECT_EQ(at(g, 60, 60)[0], 255);  // the empty fourth cell
}

TEST(Grid, CaptionsAreWrappedUnderTheirImage) {
  if (!have_font()) GTEST_SKIP() << "needs fonts-dejavu-core";
  const HostArray white = filled(64, 64, {255, 255, 255});
  const HostArray one = make_grid({{white, "a pot"}}, 1, 1);
  const HostArray long_one =
      make_grid({{white, "a very long caption that no cell of this width can hold in full, whatever is done"}}, 1, 1);
  EXPECT_EQ(one.dims()[1], 64 + 12);
  EXPECT_GT(dark_pixels(one, 70, one.dims()[0]), 20);
  EXPECT_EQ(dark_pixels(one, 0, 70), 0);
  EXPECT_EQ(long_one.dims()[0] - one.dims()[0], 2 * line_height(12));
}

TEST(Grid, CellsOfTwoSizesAreRefused) {
  EXPECT_THROW(make_grid({{filled(4, 4, {0, 0, 0}), ""}, {filled(4, 5, {0, 0, 0}), ""}}, 2), Error);
}

TEST(Text, IsInkedAndCutAtTheEdges) {
  if (!have_font()) GTEST_SKIP() << "needs fonts-dejavu-core";
  HostArray a = filled(20, 60, {255, 255, 255});
  draw_text(a, 2, 2, "Größe", 13);
  EXPECT_GT(dark_pixels(a, 0, 20), 60);
  draw_text(a, -10, -5, "cut on every side, however long it is", 40);  // must not write outside the image
}

TEST(Text, WrappedLinesFitAndKeepEveryWord) {
  if (!have_font()) GTEST_SKIP() << "needs fonts-dejavu-core";
  const std::string text = "woman in steamy room: medium-dark skin tone";
  std::string joined;
  for (const auto& line : wrap_text(text, 12, 100, 9)) {
    EXPECT_LE(text_width(line, 12), 100) << line;
    joined += (joined.empty() ? "" : " ") + line;
  }
  EXPECT_EQ(joined, text);
  const auto cut = wrap_text(text, 12, 100, 2);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_TRUE(cut[1].ends_with("…")) << cut[1];
  EXPECT_LE(text_width(cut[1], 12), 100);
  // A word wider than the line is broken between characters; invalid UTF-8 does not crash.
  const auto lines = wrap_text("ßßßßßßßßßßßßßßßßßßßß", 12, 40, 9);
  EXPECT_GT(lines.size(), 1u);
  for (const auto& p : lines) EXPECT_EQ(p.size() % 2, 0u);
  EXPECT_NO_THROW(wrap_text("\xff\xfe\xe2\x82 x\xc3", 12, 40, 3));
  EXPECT_TRUE(wrap_text("   ", 12, 40, 3).empty());
}

TEST(Image, OfABatchIsItsRow) {
  HostArray batch(Shape{DType::f32, {2, 1, 1, 3}});
  const float values[] = {0, 0, 0, -1, 1, 0};
  std::ranges::copy(values, batch.mutable_view<float>().begin());
  const HostArray one = image_of_batch(batch, 1);
  EXPECT_EQ(one.shape(), (Shape{DType::u8, {1, 1, 3}}));
  EXPECT_EQ(one.to_doubles(), (std::vector<double>{0, 255, 128}));
}

TEST(FilmStrip, ShowsFramesFromTheFirstToTheLast) {
  HostArray frames(Shape{DType::u8, {9, 4, 6, 3}});
  for (size_t i = 0; i < frames.bytes(); ++i) frames.mutable_view<uint8_t>()[i] = static_cast<uint8_t>(i / 72);
  const auto shown = [&](int64_t count) {
    const HostArray strip = film_strip(frames, count);
    std::vector<int> numbers;
    for (int64_t x = 0; x < strip.dims()[1]; x += 8)
      numbers.push_back(strip.view<uint8_t>()[static_cast<size_t>(x * 3)]);
    EXPECT_EQ(strip.dims(), (Dims{4, std::ssize(numbers) * 8 - 2, 3}));
    return numbers;
  };
  EXPECT_EQ(shown(1), (std::vector{0}));
  EXPECT_EQ(shown(2), (std::vector{0, 8}));
  EXPECT_EQ(shown(5), (std::vector{0, 2, 4, 6, 8}));
  EXPECT_EQ(shown(20), (std::vector{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

}  // namespace
}  // namespace md
