// Clips of one emoji each, on white, with captions that say what moves where: "a red heart moves to the left". A small
// dataset on which a model learns motion in minutes.
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
/// of clips. The same arguments give the same clips. The MP4 files have colours at every pixel: 4:2:0, which every
/// player supports, would halve the colour resolution of a 64-pixel emoji to 32.
int64_t prepare_moving_emoji(const std::string& folder, const MovingEmojiConfig& config);

}  // namespace md
