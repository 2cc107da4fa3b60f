#include "maxdiffusion/data/demo/emoji.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/open_source.h"

namespace md {
namespace {

namespace fs = std::filesystem;

// Deleted at program exit.
const TemporaryFolder& root() {
  static const TemporaryFolder folder;
  return folder;
}
std::string own_folder(const std::string& name) { return root() / name; }

// One hash over all names and contents.
std::string content_of(const std::string& folder) {
  std::map<std::string, std::string> names;
  for (const auto& e : fs::directory_iterator(folder)) names[e.path().filename()] = content_hash(read_file(e.path()));
  std::string all;
  for (const auto& [name, hash] : names) all += name + hash;
  return content_hash(all);
}

TEST(Emoji, MoreThanThreeThousandCaptionedImagesTheSameEachTime) {
  const std::string folder = own_folder("all");
  const int64_t n = prepare_emoji(folder, {.resolution = 32});
  EXPECT_GT(n, 3000);
  const std::string first = content_of(folder);

  // Files left by an older, longer run are deleted; the others are replaced by the same bytes.
  std::ofstream(fs::path(folder) / fmt::format("{:04}.png", n)) << "stale";
  std::ofstream(fs::path(folder) / "0000.png") << "half a pic";
  EXPECT_EQ(prepare_emoji(folder, {.resolution = 32}), n);
  EXPECT_EQ(content_of(folder), first);

  std::map<std::string, nlohmann::json> by_text;
  std::ifstream lines(fs::path(folder) / "metadata.jsonl");
  for (std::string line; std::getline(lines, line);) {
    auto row = parse_json(line);
    by_text[row["text"]] = row;
  }
  EXPECT_EQ(static_cast<int64_t>(by_text.size()), n);
  ASSERT_TRUE(by_text.contains("woman: dark skin tone, red hair"));  // a joined sequence
  ASSERT_TRUE(by_text.contains("flag: Japan"));
  EXPECT_EQ(by_text["red apple"]["group"], "Food & Drink");
  EXPECT_EQ(by_text["red apple"]["subgroup"], "food-fruit");

  const ImageConfig config{.resolution = 32};
  const LoadedImages loaded = load_images(open_source({.train_data_dir = folder}), config);
  EXPECT_EQ(loaded.pixels.dims(), (Dims{n, 32, 32, 3}));
  EXPECT_TRUE(loaded.skipped.empty());

  // Colours are in the right places: an apple is red, Japan's flag white with a red middle, corners are white.
  const HostArray apple = decode_image(folder + "/" + by_text["red apple"]["file_name"].get<std::string>());
  const auto pixel = [](const HostArray& a, int64_t y, int64_t x) {
    return &a.view<uint8_t>()[static_cast<size_t>((y * 32 + x) * 3)];
  };
  EXPECT_GT(pixel(apple, 18, 16)[0], 180);
  EXPECT_LT(pixel(apple, 18, 16)[2], 80);
  for (int64_t y : {0, 31}) EXPECT_EQ(pixel(apple, y, 0)[0], 255);
  const HostArray japan = decode_image(folder + "/" + by_text["flag: Japan"]["file_name"].get<std::string>());
  EXPECT_GT(pixel(japan, 16, 16)[0], 150);
  EXPECT_LT(pixel(japan, 16, 16)[1], 100);
}

TEST(Emoji, MissingFontNamesThePackage) {
  try {
    prepare_emoji(own_folder("none"), {.font = "/nowhere/NotoColorEmoji.ttf"});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(std::string(e.what()).find("/nowhere/NotoColorEmoji.ttf"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("fonts-noto-color-emoji"), std::string::npos);
  }
}

TEST(Emoji, FontWithoutColoursIsRefused) {
  const EmojiConfig config{.font = "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf"};
  EXPECT_THROW(prepare_emoji(own_folder("plain"), config), Error);
}

TEST(Emoji, NamesFileWithoutNamesIsRefused) {
  const std::string names = own_folder("names.txt");
  std::ofstream(names) << "263A ; unqualified # x E0.6 smiling face\n";
  EXPECT_THROW(prepare_emoji(own_folder("unnamed"), {.names = names}), Error);
}

}  // namespace
}  // namespace md
