// Clips of one emoji each, on white, and captions that say what moves where: "a red heart moves to the left". Data to
// learn motion from in minutes.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/data/demo/emoji.h"

namespace md {

struct MovingEmojiConfig {
  EmojiConfig emoji;  // its resolution: width and height of the clips, pixels; even
  int64_t num_frames = 17;
  double fps = 8;
};
/// Writes `folder`/NNNN.mp4 and `folder`/metadata.jsonl (with the columns text, object and motion). Returns the number
/// of clips. The same arguments give the same clips. They are MP4 files with colours at every pixel: of 4:2:0, that
/// everything plays, an emoji of 64 pixels has its colours at 32.
int64_t prepare_moving_emoji(const std::string& folder, const MovingEmojiConfig& config);

}  // namespace md
