// The colour emoji of Debian's fonts-noto-color-emoji as an image folder: bitmaps inside the font (FreeType, with
// HarfBuzz for sequences), captions from Unicode's emoji-test.txt (Debian's unicode-data).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/installation.h"

namespace md {

struct EmojiConfig {
  // Paths of an installation, and in Debian, Fedora, and Arch.
  std::string font = shipped_file_or(
      "fonts/NotoColorEmoji.ttf",
      {"/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
       "/usr/share/fonts/google-noto-color-emoji-fonts/NotoColorEmoji.ttf", "/usr/share/fonts/noto/NotoColorEmoji.ttf",
       "/usr/share/fonts/truetype/NotoColorEmoji.ttf", "/usr/local/share/fonts/noto/NotoColorEmoji.ttf"});
  std::string names = shipped_file_or("fonts/emoji-test.txt", {"/usr/share/unicode/emoji/emoji-test.txt"});
  int64_t resolution = 64;  // images are resolution × resolution, on white
};
/// Writes `folder/NNNN.png` and `folder/metadata.jsonl` (written last, atomically). Returns the number of images.
/// Throws io naming the missing file and its Debian package.
int64_t prepare_emoji(const std::string& folder, const EmojiConfig& config);

/// The emoji of these Unicode names ("red heart"), each u8 [resolution, resolution, 3]. Throws io, also for a name that
/// is missing in the list or the font.
std::vector<HostArray> emoji_images(const std::vector<std::string>& names, const EmojiConfig& config);

}  // namespace md
