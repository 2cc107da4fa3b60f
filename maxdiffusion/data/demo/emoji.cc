#include "maxdiffusion/data/demo/emoji.h"

#include <ft2build.h>
#include FT_FREETYPE_H
#include <harfbuzz/hb.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <type_traits>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/data/records/captioned_files.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/media/resize.h"

namespace md {
namespace {

struct EmojiName {
  std::vector<uint32_t> code_points;
  std::string name, group, subgroup;
};

std::string_view trim(std::string_view s) {
  const size_t a = s.find_first_not_of(" \t\r");
  return a == std::string_view::npos ? "" : s.substr(a, s.find_last_not_of(" \t\r") - a + 1);
}

// Format of lines: "1F44B 1F3FB ; fully-qualified # 👋🏻 E1.0 waving hand: light skin tone", between "# group:" and
// "# subgroup:".
std::vector<EmojiName> read_names(const std::string& text) {
  std::vector<EmojiName> names;
  std::string group, subgroup;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    std::string_view line(text.data() + start, end - start);
    start = end + 1;
    if (constexpr std::string_view kGroup = "# group:"; line.starts_with(kGroup))
      group = trim(line.substr(kGroup.size()));
    if (constexpr std::string_view kSub = "# subgroup:"; line.starts_with(kSub))
      subgroup = trim(line.substr(kSub.size()));
    const size_t semicolon = line.find(';'), hash = line.find('#');
    if (line.starts_with('#') || semicolon == line.npos || hash == line.npos || hash < semicolon) continue;
    if (trim(line.substr(semicolon + 1, hash - semicolon - 1)) != "fully-qualified") continue;
    EmojiName e{.group = group, .subgroup = subgroup};
    std::string codes(trim(line.substr(0, semicolon)));
    for (char *p = codes.data(), *next; *p; p = next) {
      e.code_points.push_back(static_cast<uint32_t>(std::strtoul(p, &next, 16)));
      if (next == p) break;
    }
    // After the hash: the emoji, its version, its name.
    std::string_view rest = trim(line.substr(hash + 1));
    for (int word = 0; word < 2; ++word) rest = trim(rest.substr(std::min(rest.find(' '), rest.size())));
    e.name = rest;
    if (!e.name.empty()) names.push_back(std::move(e));
  }
  return names;
}

// The font for one thread: FreeType and HarfBuzz objects must not be shared between threads.
class EmojiFont {
 public:
  EmojiFont(const MappedFile& file, const std::string& name) {
    const auto* data = reinterpret_cast<const FT_Byte*>(file.data);
    FT_Library library = nullptr;
    if (FT_Init_FreeType(&library) != 0) fail(Code::internal, "FreeType: cannot be initialized");
    library_.reset(library);
    FT_Face face = nullptr;
    if (FT_New_Memory_Face(library, data, static_cast<FT_Long>(file.size), 0, &face) == 0) face_.reset(face);
    if (!face || !FT_HAS_COLOR(face) || face->num_fixed_sizes < 1 || FT_Select_Size(face, 0) != 0) {
      fail(Code::io, "emoji font '{}': expected a font with colour bitmaps (CBDT), as in fonts-noto-color-emoji", name);
    }
    hb_blob_t* blob = hb_blob_create(reinterpret_cast<const char*>(data), static_cast<unsigned>(file.size),
                                     HB_MEMORY_MODE_READONLY, nullptr, nullptr);
    hb_face_t* shapes = hb_face_create(blob, 0);
    font_.reset(hb_font_create(shapes));
    hb_face_destroy(shapes);
    hb_blob_destroy(blob);
    buffer_.reset(hb_buffer_create());
  }
  EmojiFont(const EmojiFont&) = delete;

  /// The glyph of a sequence; none if the font would render it as several glyphs or a box.
  std::optional<uint32_t> glyph(const std::vector<uint32_t>& code_points) {
    hb_buffer_reset(buffer_.get());
    hb_buffer_add_utf32(buffer_.get(), code_points.data(), static_cast<int>(code_points.size()), 0, -1);
    hb_buffer_guess_segment_properties(buffer_.get());
    hb_buffer_set_flags(buffer_.get(), HB_BUFFER_FLAG_REMOVE_DEFAULT_IGNORABLES);  // variation selectors
    hb_shape(font_.get(), buffer_.get(), nullptr, 0);
    unsigned n = 0;
    const hb_glyph_info_t* glyphs = hb_buffer_get_glyph_infos(buffer_.get(), &n);
    if (n != 1 || glyphs[0].codepoint == 0) return std::nullopt;
    return glyphs[0].codepoint;
  }

  /// The bitmap over white, centred in a square as wide as the font's images (u8 [S, S, 3]); none if the glyph has no
  /// colours. All glyphs use the same square, so that small signs keep their relative size.
  std::optional<HostArray> image(uint32_t glyph) {
    if (FT_Load_Glyph(face_.get(), glyph, FT_LOAD_COLOR) != 0) return std::nullopt;
    const FT_Bitmap& b = face_->glyph->bitmap;
    if (b.pixel_mode != FT_PIXEL_MODE_BGRA || b.width == 0 || b.rows == 0) return std::nullopt;
    const int64_t w = b.width, h = b.rows;
    const int64_t side = std::max<int64_t>({w, h, face_->available_sizes[0].x_ppem >> 6});
    HostArray square(Shape{DType::u8, {side, side, 3}});
    std::memset(square.mutable_data(), 255, square.bytes());
    uint8_t* to = square.mutable_view<uint8_t>().data() + ((side - h) / 2 * side + (side - w) / 2) * 3;
    for (int64_t y = 0; y < h; ++y, to += side * 3) {
      const uint8_t* from = b.buffer + y * b.pitch;
      // Colours are premultiplied by alpha, blue first.
      for (int64_t x = 0; x < w; ++x) {
        for (int64_t c = 0; c < 3; ++c)
          to[x * 3 + c] = static_cast<uint8_t>(std::min(255, from[x * 4 + 2 - c] + 255 - from[x * 4 + 3]));
      }
    }
    return square;
  }

 private:
  template <auto destroy>
  struct Destroy {
    template <class T>
    void operator()(T* p) const {
      destroy(p);
    }
  };
  // In this order, so that the face is destroyed before its library.
  std::unique_ptr<std::remove_pointer_t<FT_Library>, Destroy<FT_Done_FreeType>> library_;
  std::unique_ptr<std::remove_pointer_t<FT_Face>, Destroy<FT_Done_Face>> face_;
  std::unique_ptr<hb_font_t, Destroy<hb_font_destroy>> font_;
  std::unique_ptr<hb_buffer_t, Destroy<hb_buffer_destroy>> buffer_;
};

void require_file(const std::string& path, const char* what, const char* package) {
  if (exists(path)) return;
  throw Error(Code::io, fmt::format("{} '{}': no such file", what, path))
      .note(fmt::format("try: apt-get install {}", package));
}

/// All names. Throws io if a file of the config is missing.
std::vector<EmojiName> names_of(const EmojiConfig& config) {
  require_file(config.font, "emoji font", "fonts-noto-color-emoji");
  require_file(config.names, "emoji names", "unicode-data");
  check(config.resolution > 0 && config.resolution <= 4096, Code::invalid_config, "resolution: {}; expected 1 to 4096",
        config.resolution);
  std::vector<EmojiName> names = read_names(read_file(config.names));
  check(!names.empty(), Code::io, "emoji names '{}': no line with 'fully-qualified'; expected Unicode's emoji-test.txt",
        config.names);
  return names;
}

}  // namespace

std::vector<HostArray> emoji_images(const std::vector<std::string>& names, const EmojiConfig& config) {
  const std::vector<EmojiName> all = names_of(config);
  const MappedFile file = map_file(config.font);
  EmojiFont font(file, config.font);
  std::vector<HostArray> images;
  for (const std::string& name : names) {
    const auto found = std::ranges::find(all, name, &EmojiName::name);
    check(found != all.end(), Code::io, "emoji names '{}': no emoji is called '{}'", config.names, name);
    const auto glyph = font.glyph(found->code_points);
    const auto square = glyph ? font.image(*glyph) : std::nullopt;
    check(square.has_value(), Code::io, "emoji font '{}': no image of '{}'", config.font, name);
    images.push_back(resize_rgb8(*square, config.resolution, config.resolution));
  }
  return images;
}

int64_t prepare_emoji(const std::string& folder, const EmojiConfig& config) {
  const std::vector<EmojiName> names = names_of(config);
  const MappedFile font = map_file(config.font);

  // Two sequences may share a glyph (a flag of one country used by another): the first one gets it.
  std::vector<const EmojiName*> selected;
  std::vector<uint32_t> glyphs;
  {
    EmojiFont shaper(font, config.font);
    std::set<uint32_t> seen;
    for (const EmojiName& e : names) {
      const auto g = shaper.glyph(e.code_points);
      if (!g || !seen.insert(*g).second) continue;
      selected.push_back(&e);
      glyphs.push_back(*g);
    }
  }
  std::vector<std::string> files(selected.size());  // empty if the glyph has no colours
  std::vector<std::unique_ptr<EmojiFont>> fonts(static_cast<size_t>(parallel_workers(std::ssize(selected))));
  parallel_for(std::ssize(selected), [&](int64_t i, int worker) {
    auto& worker_font = fonts[static_cast<size_t>(worker)];
    if (!worker_font) worker_font = std::make_unique<EmojiFont>(font, config.font);
    const auto square = worker_font->image(glyphs[static_cast<size_t>(i)]);
    if (square) files[static_cast<size_t>(i)] = encode_png(resize_rgb8(*square, config.resolution, config.resolution));
  });
  std::vector<CaptionedFile> captioned;
  for (size_t i = 0; i < selected.size(); ++i) {
    if (files[i].empty()) continue;
    const EmojiName& e = *selected[i];
    captioned.push_back({std::move(files[i]), {{"text", e.name}, {"group", e.group}, {"subgroup", e.subgroup}}});
  }
  const auto n = static_cast<int64_t>(captioned.size());
  check(n > 0, Code::io, "emoji font '{}': has none of the {} emoji of '{}'", config.font, names.size(), config.names);
  write_captioned_files(folder, ".png", captioned);
  log_info("{} emoji written to {}; {} of {} are not in the font or share an image", n, folder,
           names.size() - static_cast<size_t>(n), names.size());
  return n;
}

}  // namespace md
