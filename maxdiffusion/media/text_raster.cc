#include "maxdiffusion/media/text_raster.h"

#include <ft2build.h>
#include FT_FREETYPE_H

#include <algorithm>
#include <mutex>

#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"

namespace md {
namespace {

struct Font {
  FT_Library library = nullptr;
  FT_Face face = nullptr;
  std::mutex mutex;

  Font() {
    if (FT_Init_FreeType(&library) != 0) library = nullptr;
    // Paths of an installation, and in Debian, Fedora, Arch and openSUSE.
    const std::string file = shipped_file_or(
        "fonts/DejaVuSans.ttf",
        {"/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf", "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf",
         "/usr/share/fonts/TTF/DejaVuSans.ttf", "/usr/share/fonts/truetype/DejaVuSans.ttf"});
    if (!library || FT_New_Face(library, file.c_str(), 0, &face) != 0) {
      face = nullptr;
      log_warning("the font DejaVuSans.ttf cannot be read: images get no captions (Debian package fonts-dejavu-core)");
    }
  }
  ~Font() {
    if (face) FT_Done_Face(face);
    if (library) FT_Done_FreeType(library);
  }
};

Font& font() {
  static Font f;
  return f;
}

// The code point at s[i]; moves i past it. Each byte that is not UTF-8 counts as one U+FFFD.
uint32_t next_code_point(std::string_view s, size_t& i) {
  const auto byte = [&](size_t k) { return static_cast<uint8_t>(s[k]); };
  const uint8_t lead = byte(i);
  const int extra = lead < 0x80                   ? 0
                    : lead >= 0xF0 && lead < 0xF8 ? 3
                    : lead >= 0xE0 && lead < 0xF0 ? 2
                    : lead >= 0xC0 && lead < 0xE0 ? 1
                                                  : -1;
  if (extra < 0 || i + static_cast<size_t>(extra) >= s.size()) return ++i, 0xFFFD;
  uint32_t c = extra == 0 ? lead : lead & (0x3F >> extra);
  for (int k = 1; k <= extra; ++k) {
    if ((byte(i + static_cast<size_t>(k)) & 0xC0) != 0x80) return ++i, 0xFFFD;
    c = c << 6 | (byte(i + static_cast<size_t>(k)) & 0x3F);
  }
  i += static_cast<size_t>(extra) + 1;
  return c;
}

// Visits the glyphs of a line with the pen position before each (pixels); returns the final pen. Holds the lock.
template <class Visit>
int64_t walk(std::string_view utf8, int64_t height, FT_Int32 flags, Visit&& visit) {
  Font& f = font();
  if (!f.face) return 0;
  const std::lock_guard lock(f.mutex);
  FT_Set_Pixel_Sizes(f.face, 0, static_cast<FT_UInt>(height));
  int64_t pen = 0;
  for (size_t i = 0; i < utf8.size();) {
    if (FT_Load_Char(f.face, next_code_point(utf8, i), flags) != 0) continue;
    visit(f.face->glyph, pen, f.face->size->metrics.ascender >> 6);
    pen += f.face->glyph->advance.x >> 6;
  }
  return pen;
}

}  // namespace

bool have_font() { return font().face != nullptr; }

int64_t text_width(std::string_view utf8, int64_t height) {
  return walk(utf8, height, FT_LOAD_DEFAULT, [](FT_GlyphSlot, int64_t, int64_t) {});
}

int64_t line_height(int64_t height) { return height + (height + 3) / 4; }

void raster_text(std::string_view utf8, int64_t height, const std::function<void(int64_t, int64_t, uint8_t)>& plot) {
  walk(utf8, height, FT_LOAD_RENDER, [&](FT_GlyphSlot glyph, int64_t pen, int64_t baseline) {
    const FT_Bitmap& b = glyph->bitmap;
    for (unsigned y = 0; y < b.rows; ++y) {
      for (unsigned x = 0; x < b.width; ++x) {
        const uint8_t ink = b.buffer[static_cast<int64_t>(y) * b.pitch + x];
        if (ink) plot(pen + glyph->bitmap_left + x, baseline - glyph->bitmap_top + y, ink);
      }
    }
  });
}

std::vector<std::string> wrap_text(std::string_view utf8, int64_t height, int64_t width, int64_t max_lines) {
  const auto fits = [&](const std::string& s) { return text_width(s, height) <= width; };
  // The longest prefix of s that fits together with `tail`; at least one character, so that wrapping terminates.
  const auto fitting = [&](std::string_view s, std::string_view tail, size_t least) {
    size_t end = 0;
    for (size_t i = 0; i < s.size();) {
      next_code_point(s, i);
      if (end >= least && !fits(std::string(s.substr(0, i)) + std::string(tail))) break;
      end = i;
    }
    return end;
  };
  std::vector<std::string> lines;
  std::string line;
  const auto flush = [&] {
    if (!line.empty()) lines.push_back(std::move(line));
    line.clear();
  };
  for (size_t i = 0; i < utf8.size();) {
    const size_t start = utf8.find_first_not_of(" \t\n\r", i);
    if (start == std::string_view::npos) break;
    i = std::min(utf8.find_first_of(" \t\n\r", start), utf8.size());
    std::string_view word = utf8.substr(start, i - start);
    if (std::string joined = line.empty() ? std::string(word) : line + " " + std::string(word); fits(joined)) {
      line = std::move(joined);
      continue;
    }
    flush();
    while (!fits(std::string(word))) {
      const size_t cut = fitting(word, "", 1);
      lines.emplace_back(word.substr(0, cut));
      word.remove_prefix(cut);
      if (word.empty()) break;
    }
    line = word;
  }
  flush();
  if (static_cast<int64_t>(lines.size()) > max_lines) {
    lines.resize(static_cast<size_t>(max_lines));
    constexpr std::string_view kEllipsis = "\u2026";
    if (max_lines > 0)
      lines.back() = lines.back().substr(0, fitting(lines.back(), kEllipsis, 0)) + std::string(kEllipsis);
  }
  return lines;
}

}  // namespace md
