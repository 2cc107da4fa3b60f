#include "maxdiffusion/media/canny.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

using nlohmann::json;

const json& golden() {
  static const json all = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/control.json"));
  return all;
}

std::vector<uint8_t> bytes_of(const json& hex) {
  const std::string text = hex;
  std::vector<uint8_t> out;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    out.push_back(static_cast<uint8_t>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return out;
}

HostArray image_of(const json& row) {
  return HostArray::of<uint8_t>(Shape{DType::u8, {row["height"], row["width"], 3}}, bytes_of(row["rgb"]));
}

std::vector<uint8_t> values(const HostArray& a) { return {a.view<uint8_t>().begin(), a.view<uint8_t>().end()}; }

TEST(Canny, FindsTheEdgesThatOpenCvFinds) {
  for (const json& row : golden()["edges"]) {
    SCOPED_TRACE(row["height"].dump() + "x" + row["width"].dump());
    std::vector<uint8_t> want;
    for (uint8_t v : bytes_of(row["out"])) want.insert(want.end(), 3, v);
    EXPECT_EQ(values(canny_edges(image_of(row), 100, 200)), want);
  }
}

TEST(Resize, LanczosAgreesWithPillowByteForByte) {
  for (const json& row : golden()["resized"]) {
    SCOPED_TRACE(row["height"].dump() + "x" + row["width"].dump());
    EXPECT_EQ(values(resize_rgb8(image_of(row), row["to_height"], row["to_width"], Filter::lanczos)),
              bytes_of(row["out"]));
  }
}

TEST(Resize, APartIsThatOfTheWhole) {
  for (const json& row : golden()["resized"]) {
    const HostArray image = image_of(row);
    const int64_t height = row["to_height"], width = row["to_width"];
    const HostArray whole = HostArray::of<uint8_t>(Shape{DType::u8, {height, width, 3}}, bytes_of(row["out"]));
    for (const Region& r : {Region{0, 0, width, height}, Region{1, 2, width - 2, height - 2},
                            Region{width - 1, 0, 1, height}, Region{0, height - 1, width, 1}})
      EXPECT_EQ(values(resize_rgb8(image, height, width, r, Filter::lanczos)),
                values(crop_rgb8(whole, r.y, r.x, r.height, r.width)));
    // Resized along one axis only.
    for (const auto& [h, w] : {std::pair{image.dims()[0], width}, {height, image.dims()[1]}})
      EXPECT_EQ(values(resize_rgb8(image, h, w, {1, 1, w - 1, h - 1}, Filter::lanczos)),
                values(crop_rgb8(resize_rgb8(image, h, w, Filter::lanczos), 1, 1, h - 1, w - 1)));
    EXPECT_THROW(resize_rgb8(image, height, width, {1, 0, width, height}, Filter::lanczos), Error);
  }
}

}  // namespace
}  // namespace md
