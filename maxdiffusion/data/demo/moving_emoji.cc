#include "maxdiffusion/data/demo/moving_emoji.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/records/captioned_files.h"
#include "maxdiffusion/data/records/shuffle.h"
#include "maxdiffusion/media/write_video.h"

namespace md {
namespace {

constexpr int64_t kVariants = 3;  // of each object and motion, with other places and sizes

struct Object {
  std::string emoji, phrase;  // Unicode's name, and the name in captions
  bool round = false;         // looks the same when rotated
};

std::vector<Object> objects() {
  std::vector<Object> all;
  for (const std::string colour : {"red", "orange", "yellow", "green", "blue", "purple"}) {
    const std::string a = (colour == "orange" ? "an " : "a ") + colour;
    all.push_back({colour + " heart", a + " heart"});
    all.push_back({colour + " circle", a + " circle", true});
    all.push_back({colour + " square", a + " square"});
  }
  for (const auto& [emoji, phrase] : {std::pair{"star", "a yellow star"},
                                      {"automobile", "a red car"},
                                      {"frog", "a green frog"},
                                      {"red apple", "a red apple"},
                                      {"green apple", "a green apple"},
                                      {"butterfly", "a blue butterfly"}})
    all.push_back({emoji, phrase});
  return all;
}

/// Pose of the emoji at one time: its centre and side as fractions of the frame's side, and its clockwise rotation.
struct Pose {
  double x = 0.5, y = 0.5, side = 0.45, angle = 0;
};

struct Motion {
  const char *name, *phrase;
  double dx = 0, dy = 0;  // direction of the motion
  double grows = 0;       // 1: from small to large; −1: from large to small
  double turns = 0;       // 1: clockwise
};
constexpr Motion kMotions[] = {{"left", "moves to the left", -1, 0},
                               {"right", "moves to the right", 1, 0},
                               {"up", "moves up", 0, -1},
                               {"down", "moves down", 0, 1},
                               {"grow", "grows", 0, 0, 1},
                               {"shrink", "shrinks", 0, 0, -1},
                               {"clockwise", "turns clockwise", 0, 0, 0, 1},
                               {"counterclockwise", "turns counterclockwise", 0, 0, 0, -1}};

/// The pose at time `t` in [0, 1] of the clip with these random bits.
Pose pose_at(const Motion& m, double t, uint64_t bits) {
  const auto uniform = [&](double from, double to) {
    return from + (to - from) * static_cast<double>((bits = mix(bits)) >> 11) * 0x1p-53;
  };
  Pose p;
  if (m.dx != 0 || m.dy != 0) {
    p.side = uniform(0.52, 0.56);
    const double room = 1 - p.side, distance = uniform(0.92, 1) * room;  // along the direction
    const double start = p.side / 2 + uniform(0, room - distance), across = p.side / 2 + uniform(0.35, 0.65) * room;
    const double forwards = m.dx + m.dy > 0 ? t : 1 - t, along = start + distance * forwards;
    p.x = m.dx != 0 ? along : across;
    p.y = m.dx != 0 ? across : along;
    return p;
  }
  p.side = uniform(0.54, 0.58);
  if (m.grows != 0) {
    const double small = uniform(0.2, 0.24), large = uniform(0.78, 0.84), u = m.grows > 0 ? t : 1 - t;
    p.side = small + (large - small) * u;
    const double free = (1 - large) / 4;
    p.x += uniform(-free, free), p.y += uniform(-free, free);
    return p;
  }
  const double free = (1 - p.side * std::numbers::sqrt2) / 4;
  p.x += uniform(-free, free), p.y += uniform(-free, free);
  p.angle = m.turns * t * uniform(0.7, 0.8) * 2 * std::numbers::pi;
  return p;
}

/// The smallest square that contains all pixels that are not white, u8 [S, S, 3].
HostArray without_margins(const HostArray& image) {
  const int64_t s = image.dims()[0];
  const uint8_t* from = image.view<uint8_t>().data();
  int64_t top = s, left = s, bottom = 0, right = 0;
  for (int64_t i = 0; i < s * s; ++i) {
    if (std::min({from[3 * i], from[3 * i + 1], from[3 * i + 2]}) > 250) continue;
    top = std::min(top, i / s), bottom = std::max(bottom, i / s + 1);
    left = std::min(left, i % s), right = std::max(right, i % s + 1);
  }
  const int64_t side = std::max({bottom - top, right - left, int64_t{1}});
  const int64_t y = (top + bottom - side) / 2, x = (left + right - side) / 2;
  HostArray out(Shape{DType::u8, {side, side, 3}});
  std::ranges::fill(out.mutable_view<uint8_t>(), uint8_t{255});
  for (int64_t i = std::max<int64_t>(0, -y); i < side && y + i < s; ++i)
    for (int64_t j = std::max<int64_t>(0, -x); j < side && x + j < s; ++j)
      std::copy_n(from + ((y + i) * s + x + j) * 3, 3, out.mutable_view<uint8_t>().data() + (i * side + j) * 3);
  return out;
}

/// Renders `image`, u8 [S, S, 3] on white, into a white frame, u8 [R, R, 3]: each pixel is the mean of 9 sample points,
/// mapped back to the image, which is interpolated linearly.
void render(const HostArray& image, const Pose& p, int64_t r, uint8_t* to) {
  constexpr int64_t kPoints = 3;
  const int64_t s = image.dims()[0];
  const uint8_t* from = image.view<uint8_t>().data();
  const double sin = std::sin(p.angle), cos = std::cos(p.angle), scale = static_cast<double>(s) / p.side;
  // Position in the frame relative to the emoji's centre. Points beyond half its diagonal are white.
  const auto place = [&](int64_t at, double point, double centre) {
    return (static_cast<double>(at) + point) / static_cast<double>(r) - centre;
  };
  const double reach = p.side * std::numbers::sqrt2 / 2 + 1 / static_cast<double>(r);
  for (int64_t y = 0; y < r; ++y)
    for (int64_t x = 0; x < r; ++x, to += 3) {
      if (std::abs(place(x, 0.5, p.x)) > reach || std::abs(place(y, 0.5, p.y)) > reach) {
        std::fill_n(to, 3, 255);
        continue;
      }
      double sum[3] = {};
      for (int64_t k = 0; k < kPoints * kPoints; ++k) {
        const int64_t row = k / kPoints, column = k % kPoints;
        const double fx = place(x, (static_cast<double>(column) + 0.5) / kPoints, p.x),
                     fy = place(y, (static_cast<double>(row) + 0.5) / kPoints, p.y);
        const double px = (cos * fx + sin * fy) * scale + static_cast<double>(s) / 2 - 0.5,
                     py = (cos * fy - sin * fx) * scale + static_cast<double>(s) / 2 - 0.5;
        const double left = std::floor(px), top = std::floor(py);
        for (int64_t corner = 0; corner < 4; ++corner) {
          const int64_t cx = static_cast<int64_t>(left) + corner % 2, cy = static_cast<int64_t>(top) + corner / 2;
          const double weight = (corner % 2 ? px - left : 1 - px + left) * (corner / 2 ? py - top : 1 - py + top);
          const bool inside = cx >= 0 && cy >= 0 && cx < s && cy < s;
          for (int64_t c = 0; c < 3; ++c) sum[c] += weight * (inside ? from[(cy * s + cx) * 3 + c] : 255);
        }
      }
      for (int64_t c = 0; c < 3; ++c) to[c] = static_cast<uint8_t>(std::lround(sum[c] / (kPoints * kPoints)));
    }
}

}  // namespace

int64_t prepare_moving_emoji(const std::string& folder, const MovingEmojiConfig& config) {
  const int64_t r = config.emoji.resolution, n = config.num_frames;
  check(r >= 16 && r <= 2048 && r % 2 == 0, Code::invalid_config, "resolution: {}; expected an even number, 16 to 2048",
        r);
  check(n > 1 && n <= 10000, Code::invalid_config, "num_frames: {}; expected 2 to 10000", n);
  const std::vector<Object> things = objects();
  std::vector<std::string> names;
  for (const Object& o : things) names.push_back(o.emoji);
  EmojiConfig large = config.emoji;
  large.resolution = r * 2;  // about twice the rendered size
  std::vector<HostArray> images;
  for (const HostArray& image : emoji_images(names, large)) images.push_back(without_margins(image));

  struct Clip {
    size_t object;
    const Motion* motion;
  };
  std::vector<Clip> clips;
  for (size_t i = 0; i < things.size(); ++i)
    for (const Motion& m : kMotions)
      for (int64_t k = 0; k < (m.turns != 0 && things[i].round ? 0 : kVariants); ++k) clips.push_back({i, &m});
  std::vector<CaptionedFile> files(clips.size());
  parallel_for(std::ssize(clips), [&](int64_t i, int) {
    const auto& [object, motion] = clips[static_cast<size_t>(i)];
    HostArray frames(Shape{DType::u8, {n, r, r, 3}});
    for (int64_t f = 0; f < n; ++f)
      render(images[object],
             pose_at(*motion, static_cast<double>(f) / static_cast<double>(n - 1), mix(static_cast<uint64_t>(i))), r,
             frames.mutable_view<uint8_t>().data() + f * r * r * 3);
    files[static_cast<size_t>(i)] = {
        encode_mp4(frames, {.fps = config.fps, .quality = 8, .full_colour = true, .threads = 1}, folder),
        {{"text", things[object].phrase + " " + motion->phrase},
         {"object", things[object].phrase},
         {"motion", motion->name}}};
  });
  write_captioned_files(folder, ".mp4", files);
  log_info("{} clips of moving emoji written to {}", files.size(), folder);
  return std::ssize(files);
}

}  // namespace md
