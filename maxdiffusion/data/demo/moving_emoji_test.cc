#include "maxdiffusion/data/demo/moving_emoji.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/media/decode_video.h"

namespace md {
namespace {

/// The pixels of one frame that are not white: their centre and amount; and the colour of all frames.
struct Ink {
  double x = 0, y = 0, amount = 0;
};
Ink ink_of(const HostArray& frames, int64_t frame) {
  const int64_t r = frames.dims()[1];
  const uint8_t* p = frames.view<uint8_t>().data() + frame * r * r * 3;
  Ink ink;
  for (int64_t y = 0; y < r; ++y)
    for (int64_t x = 0; x < r; ++x, p += 3) {
      const double dark = 255 - std::min({p[0], p[1], p[2]});
      if (dark < 25) continue;  // a compression artefact on white
      ink.amount += dark, ink.x += dark * static_cast<double>(x), ink.y += dark * static_cast<double>(y);
    }
  return {ink.x / ink.amount, ink.y / ink.amount, ink.amount};
}
double difference(const HostArray& frames, int64_t a, int64_t b) {
  const int64_t stride = static_cast<int64_t>(frames.bytes()) / frames.dims()[0];
  double sum = 0;
  for (int64_t i = 0; i < stride; ++i)
    sum += std::abs(frames.view<uint8_t>()[static_cast<size_t>(a * stride + i)] -
                    frames.view<uint8_t>()[static_cast<size_t>(b * stride + i)]);
  return sum;
}

TEST(MovingEmoji, EveryClipDoesWhatItsCaptionSays) {
  const TemporaryFolder folder;
  const MovingEmojiConfig config{.emoji = {.resolution = 32}, .num_frames = 5, .fps = 8};
  const int64_t n = prepare_moving_emoji(folder / "a", config);
  EXPECT_EQ(n, (24 * 8 - 6 * 2) * 3);
  std::istringstream lines(read_file(folder / "a/metadata.jsonl"));
  std::map<std::string, int> captions;
  std::set<std::string> contents;
  for (std::string line; std::getline(lines, line);) {
    const auto row = parse_json(line);
    const std::string text = row["text"], file = folder / ("a/" + row["file_name"].get<std::string>());
    ++captions[text];
    const std::string bytes = read_file(file);
    contents.insert(content_hash(bytes));
    const HostArray frames = decode_video(bytes, file, {.fps = 8}, 1);
    ASSERT_EQ(frames.dims(), (Dims{5, 32, 32, 3})) << text;
    const Ink first = ink_of(frames, 0), last = ink_of(frames, 4);
    const double dx = last.x - first.x, dy = last.y - first.y;
    const bool still = std::abs(dx) < 4 && std::abs(dy) < 4;
    const auto does = [&](const char* what, bool seen) {
      EXPECT_TRUE(seen || text.find(what) == text.npos)
          << text << ": " << dx << " " << dy << " " << first.amount << " " << last.amount;
    };
    does(" moves to the left", dx < -10 && std::abs(dy) < 1.5);
    does(" moves to the right", dx > 10 && std::abs(dy) < 1.5);
    does(" moves up", dy < -10 && std::abs(dx) < 1.5);
    does(" moves down", dy > 10 && std::abs(dx) < 1.5);
    does(" grows", still && last.amount > 4 * first.amount);
    does(" shrinks", still && first.amount > 4 * last.amount);
    does(" turns ", std::abs(std::log(last.amount / first.amount)) < 0.2 && difference(frames, 0, 1) > 2000);
    for (int64_t f = 0; f + 1 < 5; ++f) EXPECT_GT(difference(frames, f, f + 1), 500) << text;
  }
  EXPECT_EQ(static_cast<int64_t>(captions.size()) * 3, n);
  for (const auto& [text, times] : captions) EXPECT_EQ(times, 3) << text;
  EXPECT_EQ(static_cast<int64_t>(contents.size()), n);  // no two clips are equal
  EXPECT_TRUE(captions.contains("a red heart moves to the left"));
  EXPECT_TRUE(captions.contains("an orange square turns clockwise"));
  EXPECT_FALSE(captions.contains("a red circle turns clockwise"));
}

TEST(MovingEmoji, TheSameArgumentsGiveTheSameFiles) {
  const TemporaryFolder folder;
  const MovingEmojiConfig config{.emoji = {.resolution = 16}, .num_frames = 2};
  for (const char* name : {"a", "b"}) prepare_moving_emoji(folder / name, config);
  for (const char* name : {"0000.mp4", "0500.mp4", "0539.mp4", "metadata.jsonl"})
    EXPECT_EQ(read_file(folder / (std::string("a/") + name)), read_file(folder / (std::string("b/") + name)));
}

TEST(MovingEmoji, SettingsOutOfRangeAreRefused) {
  const TemporaryFolder folder;
  EXPECT_THROW(prepare_moving_emoji(folder / "a", {.emoji = {.resolution = 33}}), Error);
  EXPECT_THROW(prepare_moving_emoji(folder / "a", {.num_frames = 1}), Error);
  EXPECT_THROW(prepare_moving_emoji(folder / "a", {.fps = 0}), Error);
  EXPECT_THROW(prepare_moving_emoji(folder / "a", {.emoji = {.font = "/nowhere/font.ttf"}}), Error);
  EXPECT_FALSE(exists(folder / "a"));
}

}  // namespace
}  // namespace md
