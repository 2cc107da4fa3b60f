// `prepare_emoji` and `prepare_moving_emoji`: datasets of the emoji font.
#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/data/demo/emoji.h"
#include "maxdiffusion/data/demo/moving_emoji.h"

namespace md {
namespace {

struct EmojiKeys : EmojiConfig {
  template <class V>
  void visit(V&& v) {
    v("font", font, "the colour emoji font", KeyPath::input);
    v("names", names, "Unicode's emoji-test.txt", KeyPath::input);
    v("resolution", resolution, "pixels per side");
  }
};
struct ClipKeys {
  MovingEmojiConfig config;
  template <class V>
  void visit(V&& v) {
    v("num_frames", config.num_frames, "frames of each clip");
    v("fps", config.fps, "frames per second");
  }
};

/// The folder that is a command's first word.
std::string folder_of(const char* command, const Words& words) {
  check(!words.empty(), Code::invalid_config, "{}: the folder to write to is missing", command);
  check(!words[0].starts_with('-'), Code::invalid_config, "{}: expected the folder to write to before keys, found '{}'",
        command, words[0]);
  return words[0];
}

void images(const Words& words) {
  const std::string folder = folder_of("prepare_emoji", words);
  EmojiKeys keys;
  assign(words, 1, keys);
  const int64_t count = prepare_emoji(folder, keys);
  fmt::print("{} images in {}\n", count, folder);
}

void clips(const Words& words) {
  const std::string folder = folder_of("prepare_moving_emoji", words);
  EmojiKeys emoji;
  ClipKeys keys;
  emoji.resolution = keys.config.emoji.resolution;
  assign(words, 1, emoji, keys);
  keys.config.emoji = emoji;
  const int64_t count = prepare_moving_emoji(folder, keys.config);
  fmt::print("{} clips in {}\n", count, folder);
}

}  // namespace

Command prepare_emoji_command() {
  return {"prepare_emoji", "FOLDER [resolution=64]", "render the colour emoji font as captioned images", images,
          [](const KeyPrinter& print) { print_command_keys<EmojiKeys>(print); }};
}

Command prepare_moving_emoji_command() {
  return {"prepare_moving_emoji", "FOLDER [resolution=64] [num_frames=17] [fps=8]",
          "render short clips of moving emoji with captions", clips,
          [](const KeyPrinter& print) { print_command_keys<EmojiKeys, ClipKeys>(print); }};
}

}  // namespace md
