#include "maxdiffusion/data/images/aspect_buckets.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

using nlohmann::json;

// See tools/golden/buckets.py.
const json& golden() {
  static const json g = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/buckets.json"));
  return g;
}
/// [width, height].
ImageSize size_of(const json& pair) { return {pair[1], pair[0]}; }

void expect_choices(const AspectBuckets& buckets, const json& choices) {
  ASSERT_GT(choices.size(), 25u);
  for (const json& row : choices) {
    SCOPED_TRACE(to_string(size_of(row[0])));
    const AspectBuckets::Choice c = buckets.choose(size_of(row[0]));
    EXPECT_EQ(to_string(c.size), to_string(size_of(row[1])));
    EXPECT_EQ(to_string(c.resized), to_string(size_of(row[2])));
    EXPECT_TRUE(c.resized.height >= c.size.height && c.resized.width >= c.size.width);
  }
}

TEST(AspectBuckets, AreThoseOfTheFormulaAndImagesGoToTheNearest) {
  for (const json& list : golden()["lists"]) {
    const AspectBuckets buckets({list["resolution"], list["min"], list["max"], list["step"]});
    std::vector<ImageSize> expected;
    for (const json& pair : list["sizes"]) expected.push_back(size_of(pair));
    EXPECT_EQ(buckets.sizes(), expected) << list["resolution"];
    expect_choices(buckets, list["choices"]);
  }
}

TEST(AspectBuckets, WithoutEnlargingFollowTheImages) {
  for (const json& list : golden()["smaller"]) {
    const AspectBuckets buckets(
        {.resolution = list["resolution"], .bucket_reso_steps = list["step"], .bucket_no_upscale = true});
    EXPECT_TRUE(buckets.sizes().empty());
    expect_choices(buckets, list["choices"]);
  }
  const AspectBuckets buckets({.bucket_no_upscale = true});
  EXPECT_EQ(buckets.choose({200, 300}).size, (ImageSize{192, 256}));
  EXPECT_EQ(buckets.choose({200, 300}).resized, (ImageSize{200, 300}));
  try {
    buckets.choose({63, 300});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(e.message().find("300x63"), std::string::npos) << e.message();
  }
}

TEST(AspectBuckets, KeysThatDoNotFitAreRefusedByName) {
  const auto refusal = [](const AspectBucketConfig& c) {
    try {
      AspectBuckets buckets(c);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      return e.message();
    }
    return std::string("accepted");
  };
  for (const auto& [config, part] :
       std::vector<std::pair<AspectBucketConfig, std::string>>{{{.bucket_reso_steps = 0}, "bucket_reso_steps is 0"},
                                                               {{.resolution = 32}, "bucket_reso_steps is 64"},
                                                               {{.min_bucket_reso = 300}, "min_bucket_reso is 300"},
                                                               {{.max_bucket_reso = 1000}, "max_bucket_reso is 1000"},
                                                               {{.resolution = 1100}, "resolution 1100 is not between"},
                                                               {{.resolution = 200}, "resolution 200 is not between"}})
    EXPECT_NE(refusal(config).find(part), std::string::npos) << refusal(config);
  EXPECT_EQ(refusal({.resolution = 200, .min_bucket_reso = 300, .bucket_no_upscale = true}), "accepted");
}

TEST(AspectBuckets, ClipsTakeTheMostFramesThatTheyHaveThenTheNearestShape) {
  const AspectBuckets listed = AspectBuckets::of({{32, 48, 17}, {48, 32, 17}, {32, 32, 5}});
  const auto chosen = [](const AspectBuckets& b, ImageSize clip) { return to_string(b.choose(clip).size); };
  EXPECT_EQ(chosen(listed, {100, 200, 30}), "48x32x17");
  EXPECT_EQ(chosen(listed, {200, 100, 17}), "32x48x17");
  EXPECT_EQ(chosen(listed, {200, 100, 16}), "32x32x5");
  EXPECT_EQ(listed.choose({100, 200, 30}).resized, (ImageSize{32, 64, 17}));
  try {
    listed.choose({100, 200, 4});
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_EQ(e.message(), "4 frames; expected at least 5, as the shortest bucket of frame_buckets has");
  }
  const AspectBuckets made(
      {.resolution = 32, .min_bucket_reso = 16, .max_bucket_reso = 48, .bucket_reso_steps = 16, .frames = {9, 5}});
  EXPECT_EQ(made.sizes()[0], (ImageSize{48, 16, 5}));
  EXPECT_EQ(made.sizes()[1], (ImageSize{48, 16, 9}));
  EXPECT_EQ(chosen(made, {40, 42, 8}), "32x32x5");
  const AspectBuckets smaller({.resolution = 64, .bucket_reso_steps = 16, .bucket_no_upscale = true, .frames = {9, 5}});
  EXPECT_EQ(chosen(smaller, {40, 42, 12}), "32x32x9");
  EXPECT_THROW(AspectBuckets::of({}), Error);
  EXPECT_THROW(AspectBuckets::of({{32, 0, 5}}), Error);
}

}  // namespace
}  // namespace md
