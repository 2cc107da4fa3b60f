// Sources: Exif 2.32, 4.6 (tags); TIFF 6.0, section 2 (image file directories); PNG, third edition, 11.3 (eXIf, tEXt,
// zTXt, iTXt); WebP container specification (EXIF, XMP); ISO/IEC 23008-12, 6.5 and 9.3 (item properties, irot, imir).
#include "maxdiffusion/media/orientation.h"

#include <zlib.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace md {
namespace {

constexpr int kUnknown = 0;

/// Big or little endian numbers at any place; 0 where the bytes end before.
struct Numbers {
  std::string_view bytes;
  bool little = false;
  uint64_t at(uint64_t offset, size_t size) const {
    if (offset > bytes.size() || bytes.size() - offset < size) return 0;
    uint64_t v = 0;
    for (size_t i = 0; i < size; ++i)
      v |= uint64_t{static_cast<uint8_t>(bytes[offset + i])} << 8 * (little ? i : size - 1 - i);
    return v;
  }
};

/// The part of `bytes` that exists.
std::string_view part(std::string_view bytes, uint64_t offset, uint64_t size) {
  return offset > bytes.size() ? std::string_view() : bytes.substr(offset, size);
}

/// `tiff:Orientation="6"` or `<tiff:Orientation>6<`.
int of_xmp(std::string_view xmp) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (size_t at = xmp.find(kName); at != xmp.npos; at = xmp.find(kName, at + 1)) {
    std::string_view rest = xmp.substr(at + kName.size());
    if (!rest.starts_with("=\"") && !rest.starts_with(">")) continue;
    rest.remove_prefix(rest[0] == '=' ? 2 : 1);
    if (!rest.empty() && rest[0] >= '1' && rest[0] <= '8') return rest[0] - '0';
  }
  return kUnknown;
}

/// Tag 0x0112 of the first image file directory, else of its XMP.
int of_tiff(std::string_view tiff) {
  while (tiff.starts_with(std::string_view("Exif\0\0", 6))) tiff.remove_prefix(6);
  if (tiff.size() < 8 || (!tiff.starts_with("II") && !tiff.starts_with("MM"))) return kUnknown;
  const Numbers n{tiff, tiff[0] == 'I'};
  const uint64_t directory = n.at(4, 4), entries = n.at(directory, 2);
  int xmp = kUnknown;
  for (uint64_t e = 0; e < entries; ++e) {
    const uint64_t at = directory + 2 + 12 * e, tag = n.at(at, 2), type = n.at(at + 2, 2), count = n.at(at + 4, 4);
    constexpr uint64_t kByte = 1, kLong = 4;
    if (tag == 0x0112) {
      const uint64_t v = n.at(at + 8, type == kByte ? 1 : type == kLong ? 4 : 2);
      return v >= 1 && v <= 8 ? static_cast<int>(v) : 1;
    }
    if (tag == 700) xmp = of_xmp(part(tiff, n.at(at + 8, 4), count));
  }
  return xmp;
}

int first_known(int a, int b) { return a != kUnknown ? a : b; }

int of_jpeg(std::string_view b) {
  int exif = kUnknown, xmp = kUnknown;
  constexpr std::string_view kExif("Exif\0\0", 6), kXmp("http://ns.adobe.com/xap/1.0/\0", 29);
  for (size_t at = 2; (at = b.find('\xff', at)) != b.npos;) {
    at = b.find_first_not_of('\xff', at);
    if (at == b.npos) break;
    const auto marker = static_cast<uint8_t>(b[at++]);
    if (marker == 0xda || marker == 0xd9) break;                                    // the pixels, the end
    if (marker == 0 || marker == 1 || (marker >= 0xd0 && marker < 0xd9)) continue;  // without a length
    const uint64_t size = Numbers{b}.at(at, 2);
    if (size < 2) break;
    const std::string_view segment = part(b, at + 2, size - 2);
    if (marker == 0xe1 && exif == kUnknown && segment.starts_with(kExif)) exif = of_tiff(segment);
    if (marker == 0xe1 && xmp == kUnknown && segment.starts_with(kXmp)) xmp = of_xmp(segment);
    at += size;
  }
  return first_known(exif, xmp);
}

/// zlib's data, up to a size that no EXIF or XMP has.
std::string inflated(std::string_view data) {
  std::string out(size_t{1} << 20, '\0');
  z_stream z{};
  if (inflateInit(&z) != Z_OK) return "";
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(data.data()));  // zlib does not write there
  z.avail_in = static_cast<uInt>(std::min<size_t>(data.size(), size_t{1} << 24));
  z.next_out = reinterpret_cast<Bytef*>(out.data());
  z.avail_out = static_cast<uInt>(out.size());
  inflate(&z, Z_FINISH);
  out.resize(out.size() - z.avail_out);
  inflateEnd(&z);
  return out;
}

/// ImageMagick's raw profile: a line with its name, one with its length, then hexadecimal digits in lines.
int of_raw_profile(std::string_view text) {
  for (int lines = 0; lines < 3; ++lines) {
    const size_t end = text.find('\n');
    if (end == text.npos) return kUnknown;
    text.remove_prefix(end + 1);
  }
  const auto digit = [](char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
  };
  std::string bytes;
  int high = -1;
  for (const char c : text) {
    const int d = digit(c);
    if (d < 0) continue;
    if (high >= 0) bytes += static_cast<char>(high << 4 | d);
    high = high >= 0 ? -1 : d;
  }
  return of_tiff(bytes);
}

int of_png(std::string_view b) {
  int exif = kUnknown, raw = kUnknown, xmp = kUnknown;
  const Numbers n{b};
  for (uint64_t at = 8; at + 8 <= b.size();) {
    const uint64_t size = n.at(at, 4);
    const std::string_view type = b.substr(at + 4, 4), data = part(b, at + 8, size);
    if (type == "eXIf" && exif == kUnknown) exif = of_tiff(data);
    const size_t end = data.find('\0');
    if ((type == "tEXt" || type == "zTXt" || type == "iTXt") && end != data.npos) {
      const std::string_view key = data.substr(0, end);
      const bool profile = key == "Raw profile type exif" || key == "Raw profile type APP1";
      const bool packet = key == "XML:com.adobe.xmp";
      if (profile && type == "tEXt") raw = of_raw_profile(data.substr(end + 1));
      if (profile && type == "zTXt") raw = of_raw_profile(inflated(part(data, end + 2, data.size())));
      if (packet && type == "iTXt") {  // two flags, a language, a translated key, the text
        const bool packed = Numbers{data}.at(end + 1, 1) == 1;
        const size_t language = data.find('\0', std::min(end + 3, data.size()));
        const size_t translated = language == data.npos ? language : data.find('\0', language + 1);
        if (translated != data.npos) {
          const std::string_view text = data.substr(translated + 1);
          xmp = packed ? of_xmp(inflated(text)) : of_xmp(text);
        }
      }
    }
    if (type == "IEND") break;
    at += 12 + size;
  }
  return first_known(exif, first_known(raw, xmp));
}

int of_webp(std::string_view b) {
  int exif = kUnknown, xmp = kUnknown;
  const Numbers n{b, true};
  for (uint64_t at = 12; at + 8 <= b.size();) {
    const uint64_t size = n.at(at + 4, 4);
    const std::string_view type = b.substr(at, 4), data = part(b, at + 8, size);
    if (type == "EXIF" && exif == kUnknown) exif = of_tiff(data);
    if (type == "XMP " && xmp == kUnknown) xmp = of_xmp(data);
    at += 8 + size + size % 2;
  }
  return first_known(exif, xmp);
}

struct Box {
  std::string_view type, content;
};
/// The next box of ISO/IEC 14496-12, which `rest` loses.
std::optional<Box> next_box(std::string_view& rest) {
  const Numbers n{rest};
  uint64_t size = n.at(0, 4), head = 8;
  if (rest.size() < head) return {};
  if (size == 1) size = n.at(8, 8), head = 16;
  if (size == 0) size = rest.size();
  if (size < head || size > rest.size()) return {};
  const Box box{rest.substr(4, 4), rest.substr(head, size - head)};
  rest.remove_prefix(size);
  return box;
}
std::string_view child(std::string_view boxes, std::string_view type) {
  while (const auto box = next_box(boxes))
    if (box->type == type) return box->content;
  return {};
}

/// The properties irot and imir of the primary item.
int of_avif(std::string_view b) {
  const std::string_view meta = part(child(b, "meta"), 4, b.size());  // after version and flags
  const Numbers primary{child(meta, "pitm")};
  const uint64_t item = primary.at(0, 1) == 0 ? primary.at(4, 2) : primary.at(4, 4);
  std::string_view properties = child(meta, "iprp"), all = child(properties, "ipco");
  uint64_t angle = 0;
  int axis = -1;  // −1: not mirrored
  while (const auto box = next_box(properties)) {
    if (box->type != "ipma") continue;
    const Numbers n{box->content};
    const bool wide_items = n.at(0, 1) > 0, wide = n.at(3, 1) & 1;
    uint64_t at = 8;
    for (uint64_t entries = n.at(4, 4); entries > 0 && at < box->content.size(); --entries) {
      const uint64_t of = n.at(at, wide_items ? 4 : 2);
      at += wide_items ? 4 : 2;
      for (uint64_t count = n.at(at++, 1); count > 0; --count) {
        uint64_t index = wide ? n.at(at, 2) & 0x7fff : n.at(at, 1) & 0x7f;  // counts from 1
        at += wide ? 2 : 1;
        if (of != item) continue;
        std::optional<Box> property;
        for (std::string_view rest = all; index > 0; --index)
          if (!(property = next_box(rest))) break;
        if (property && property->type == "irot") angle = Numbers{property->content}.at(0, 1) & 3;
        if (property && property->type == "imir") axis = Numbers{property->content}.at(0, 1) & 1 ? 1 : 0;
      }
    }
  }
  // First a rotation by quarters against the clock, then top and bottom (0) or left and right (1) change places.
  constexpr int kTurned[] = {1, 8, 3, 6}, kTopAndBottom[] = {4, 5, 2, 7}, kLeftAndRight[] = {2, 7, 4, 5};
  return (axis < 0 ? kTurned : axis == 0 ? kTopAndBottom : kLeftAndRight)[angle];
}

}  // namespace

int stored_orientation(std::span<const uint8_t> bytes) {
  const std::string_view b(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  int found = kUnknown;
  if (b.starts_with("\xff\xd8"))
    found = of_jpeg(b);
  else if (b.starts_with("\x89PNG"))
    found = of_png(b);
  else if (b.starts_with("RIFF") && part(b, 8, 4) == "WEBP")
    found = of_webp(b);
  else if (b.starts_with(std::string_view("II*\0", 4)) || b.starts_with(std::string_view("MM\0*", 4)))
    found = of_tiff(b);
  else if (part(b, 4, 7) == "ftypavi")
    found = of_avif(b);
  return found == kUnknown ? 1 : found;
}

HostArray upright(HostArray rgb, int o) {
  if (o == 1 || !rgb) return rgb;
  const int64_t h = rgb.dims()[0], w = rgb.dims()[1];
  const bool swap = o >= 5;  // then stored rows, columns or both run backwards
  const bool rows_back = o == 3 || o == 4 || o == 6 || o == 7, columns_back = o == 2 || o == 3 || o == 7 || o == 8;
  HostArray out(Shape{DType::u8, {swap ? w : h, swap ? h : w, 3}});
  const auto from = rgb.view<uint8_t>();
  auto to = out.mutable_view<uint8_t>().begin();
  for (int64_t y = 0; y < out.dims()[0]; ++y) {
    for (int64_t x = 0; x < out.dims()[1]; ++x) {
      const int64_t row = swap ? x : y, column = swap ? y : x;
      const int64_t at = (rows_back ? h - 1 - row : row) * w + (columns_back ? w - 1 - column : column);
      to = std::copy_n(from.begin() + at * 3, 3, to);
    }
  }
  return out;
}

}  // namespace md
