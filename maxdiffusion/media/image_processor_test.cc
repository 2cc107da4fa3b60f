#include "maxdiffusion/media/image_processor.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

using nlohmann::json;

HostArray image(const json& row) {
  const int64_t h = row["height"], w = row["width"];
  HostArray rgb(Shape{DType::u8, {h, w, 3}});
  auto v = rgb.mutable_view<uint8_t>();
  const std::string hex = row["rgb"];
  for (size_t i = 0; i < v.size(); ++i) {
    const auto p = static_cast<int64_t>(i / 3), y = p / w, x = p % w;
    const std::array<int64_t, 3> ramp = {x * 7 + y, x + y * 5, x * y};
    v[i] = static_cast<uint8_t>(hex == "ramp" ? ramp[i % 3] % 256 : std::stoi(hex.substr(2 * i, 2), nullptr, 16));
  }
  return rgb;
}

// Recorded from transformers' CLIPImageProcessor.
TEST(ImageProcessor, GivesTheNumbersOfTransformers) {
  const json golden = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/image_processor.json"));
  ASSERT_GT(golden["rows"].size(), 10u);
  for (const json& row : golden["rows"]) {
    const HostArray out = ImageProcessor::from_json(row["config"]).apply(image(row));
    ASSERT_EQ(out.dims(), (Dims{row["out_height"], row["out_width"], 3})) << row["config"];
    const auto got = out.view<float>();
    const size_t step = row["step"];
    for (size_t i = 0; i < row["out"].size(); ++i)
      ASSERT_FLOAT_EQ(got[i * step], row["out"][i].get<float>()) << row["config"] << " number " << i * step;
  }
}

TEST(ImageProcessor, RefusesByNameWhatItDoesNotDo) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"size", {{"longest_edge", 8}}},
                                                                            {"size", 0},
                                                                            {"size", {{"height", 8}, {"width", "8"}}},
                                                                            {"crop_size", {{"shortest_edge", 8}}},
                                                                            {"resample", 0},
                                                                            {"do_resize", 1},
                                                                            {"rescale_factor", "1/255"},
                                                                            {"image_mean", {0.5, 0.5}},
                                                                            {"image_std", 0.5}}) {
    try {
      ImageProcessor::from_json({{key, value}});
      ADD_FAILURE() << key << " is accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(std::string(e.what()).find("'" + key + "'"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace md
