// PNG files and grids of images with captions. Images are u8 [H, W, 3].
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"

namespace md {

/// Text metadata of a PNG file: keyword (Latin-1, at most 79 bytes) → UTF-8.
using PngTexts = std::map<std::string, std::string>;
/// rgb: u8 [H, W, 3] → the bytes of a PNG file, with the texts as iTXt chunks. Deterministic.
std::string encode_png(const HostArray& rgb, const PngTexts& texts = {});
/// rgb: u8 [H, W, 3]. Written to a temporary name and renamed. Throws io.
void write_png(const std::string& path, const HostArray& rgb, const PngTexts& texts = {});
/// The texts of a PNG file's bytes, before and behind its pixels, in UTF-8 whichever chunks hold them. `name`: for
/// messages. Throws io.
PngTexts png_texts(std::span<const uint8_t> bytes, const std::string& name);
/// f32 [H, W, 3] in [−1, 1] → u8, clipped and rounded.
HostArray to_rgb8(const HostArray& pixels);
/// Image `i` of f32 [N, H, W, 3] in [−1, 1], as to_rgb8 gives it: u8 [H, W, 3].
HostArray image_of_batch(const HostArray& images, int64_t i);

struct GridCell {
  HostArray rgb;        // u8 [H, W, 3], all of one size
  std::string caption;  // printed under the image if not empty, wrapped to its width
};
/// Row-major grid on white with `columns` columns, images enlarged by the integer `zoom` (nearest neighbour). Captions
/// of more than three lines end with an ellipsis. Throws internal when cells differ in size.
HostArray make_grid(const std::vector<GridCell>& cells, int64_t columns, int64_t zoom = 1);
/// Arranges images u8 [H, W, 3] of any sizes in rows on white, each centred in a cell of the largest size. Labels stand
/// above columns and left of rows; their font grows with the cells. rows: empty, or one label per row of images. Throws
/// internal if the number of images is not that of the cells.
HostArray make_sheet(const std::vector<HostArray>& images, const std::vector<std::string>& columns,
                     const std::vector<std::string>& rows);
/// `count` frames of a clip (u8 [F, H, W, 3]) side by side, evenly spaced from the first to the last; all frames if
/// there are fewer. make_grid of strips is a contact sheet of clips.
HostArray film_strip(const HostArray& frames, int64_t count);
/// One line of text in DejaVu Sans (FreeType), black on the image, clipped at its edges. x, y: top left; height: pixels
/// per em. Without the font: no text and one warning.
void draw_text(HostArray& rgb, int64_t x, int64_t y, const std::string& utf8, int64_t height);

}  // namespace md
