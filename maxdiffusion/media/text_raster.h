// Lines of text as grey coverage: DejaVu Sans through FreeType. The font is opened once per process; if it is missing,
// no text is rendered and one warning names the package. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace md {

/// False when the font is missing, after warning once.
bool have_font();
/// Advance of one line in pixels at this text height (pixels per em).
int64_t text_width(std::string_view utf8, int64_t height);
/// Distance of two baselines, and of the top to the first baseline, in pixels.
int64_t line_height(int64_t height);
/// Calls plot(x, y, coverage 0…255) for every covered pixel of one line whose top left corner is (0, 0).
void raster_text(std::string_view utf8, int64_t height, const std::function<void(int64_t, int64_t, uint8_t)>& plot);
/// Breaks at spaces to lines no wider than `width`; longer words are cut. More than `max_lines`: the last line ends
/// with an ellipsis.
std::vector<std::string> wrap_text(std::string_view utf8, int64_t height, int64_t width, int64_t max_lines);

}  // namespace md
