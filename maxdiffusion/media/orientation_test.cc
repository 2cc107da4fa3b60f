#include "maxdiffusion/media/orientation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/media/decode_video.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

using nlohmann::json;

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}
std::span<const uint8_t> span_of(const std::string& s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

// Files of every orientation and format, upright by Pillow's exif_transpose; see tools/golden/orientations.py.
const json& golden() {
  static const json g = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/orientations.json"));
  return g;
}
int largest_difference(const HostArray& a, const std::string& b) {
  const auto v = a.view<uint8_t>();
  if (v.size() != b.size()) return 256;
  int most = 0;
  for (size_t i = 0; i < b.size(); ++i) most = std::max(most, std::abs(v[i] - static_cast<uint8_t>(b[i])));
  return most;
}

TEST(Orientation, OfEveryFormatIsAppliedAsByPillow) {
  std::set<std::string> names;
  for (const json& row : golden()["files"]) {
    const std::string name = row["name"], file = from_hex(row["file"]);
    SCOPED_TRACE(name + " " + row["orientation"].dump());
    names.insert(name);
    EXPECT_EQ(stored_orientation(span_of(file)), row["orientation"].get<int>());
    const DecodedImage whole = decode_stored_image(file.data(), file.size(), name);
    const ImageSize size{row["height"], row["width"]};
    EXPECT_EQ(whole.rgb.dims(), (Dims{size.height, size.width, 3}));
    EXPECT_LE(largest_difference(whole.rgb, from_hex(row["rgb"])), row["tolerance"].get<int>());
    EXPECT_EQ(whole.size, size);
    EXPECT_EQ(decode_stored_image(file.data(), file.size(), name, {.only_size = true}).size, size);
  }
  EXPECT_EQ(names.size() * 8, golden()["files"].size());
}

TEST(Orientation, TurnsAlphaWithTheColours) {
  for (const json& row : golden()["files"]) {
    if (!row["name"].get<std::string>().starts_with("alpha.")) continue;
    SCOPED_TRACE(row["name"].dump() + " " + row["orientation"].dump());
    const std::string file = from_hex(row["file"]);
    const DecodedImage apart = decode_stored_image(file.data(), file.size(), "it", {.alpha = true});
    ASSERT_TRUE(apart.alpha);
    ASSERT_EQ(apart.alpha.dims(), apart.rgb.dims());
    std::string over_white;
    for (size_t i = 0; i < apart.rgb.view<uint8_t>().size(); ++i) {
      const int alpha = apart.alpha.view<uint8_t>()[i];
      over_white += static_cast<char>((apart.rgb.view<uint8_t>()[i] * alpha + 255 * (255 - alpha) + 127) / 255);
    }
    HostArray composed(apart.rgb.shape());
    std::ranges::copy(span_of(over_white), composed.mutable_view<uint8_t>().begin());
    EXPECT_LE(largest_difference(composed, from_hex(row["rgb"])), 1);
  }
}

TEST(Orientation, OfAnImageAsAClipOfOneFrameIsApplied) {
  for (const json& row : golden()["files"]) {
    if (row["orientation"] != 6 || row["name"] == "moving.webp") continue;
    SCOPED_TRACE(row["name"].dump());
    const std::string file = from_hex(row["file"]);
    const HostArray frames = decode_video(file, "it");
    EXPECT_EQ(frames.dims(), (Dims{1, row["height"], row["width"], 3}));
    EXPECT_LE(largest_difference(frames, from_hex(row["rgb"])), row["tolerance"].get<int>());
  }
}

TEST(Orientation, IsUprightWithoutATagOrWithADamagedOne) {
  const std::string png = encode_png(HostArray(Shape{DType::u8, {2, 3, 3}}));
  EXPECT_EQ(stored_orientation(span_of(png)), 1);
  EXPECT_EQ(stored_orientation({}), 1);
  // Every prefix, and every byte changed, is read within its bounds and gives one of the eight.
  for (const json& row : golden()["files"]) {
    if (row["orientation"] != 7) continue;
    const std::string file = from_hex(row["file"]);
    for (size_t n = 0; n < file.size(); ++n) {
      const std::string prefix = file.substr(0, n);
      std::string changed = file;
      changed[n] = static_cast<char>(~changed[n]);
      for (const std::string& bytes : {prefix, changed}) {
        const int o = stored_orientation(span_of(bytes));
        ASSERT_TRUE(o >= 1 && o <= 8) << row["name"] << " " << n << " " << o;
      }
    }
  }
}

}  // namespace
}  // namespace md
