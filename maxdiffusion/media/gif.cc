#include "maxdiffusion/media/gif.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Colour = std::array<uint8_t, 3>;
constexpr size_t kColours = 256;

uint32_t key_of(const uint8_t* p) { return static_cast<uint32_t>(p[0] << 16 | p[1] << 8 | p[2]); }

/// A colour, its count, and finally its index in the palette.
struct Counted {
  Colour colour;
  int64_t count = 0;
};

/// A set of colours of the median cut; the one with the widest channel is split next.
struct Box {
  size_t begin, end;
  size_t channel = 0;
  int width = 0;
};

Box box_of(const std::vector<Counted>& all, size_t begin, size_t end) {
  Box box{begin, end};
  for (size_t c = 0; c < 3; ++c) {
    const auto [low, high] =
        std::minmax_element(all.begin() + static_cast<int64_t>(begin), all.begin() + static_cast<int64_t>(end),
                            [c](const Counted& a, const Counted& b) { return a.colour[c] < b.colour[c]; });
    if (const int width = high->colour[c] - low->colour[c]; width > box.width) box.channel = c, box.width = width;
  }
  return box;
}

/// At most kColours colours; `place`: palette index of every colour.
std::vector<Colour> palette_of(std::vector<Counted> all, std::unordered_map<uint32_t, uint8_t>& place) {
  std::vector<Box> boxes = {box_of(all, 0, all.size())};
  while (boxes.size() < kColours) {
    const auto widest = std::ranges::max_element(boxes, {}, &Box::width);
    if (widest->width == 0) break;
    const Box box = *widest;
    const auto begin = all.begin() + static_cast<int64_t>(box.begin), end = all.begin() + static_cast<int64_t>(box.end);
    std::sort(begin, end, [&](const Counted& a, const Counted& b) {
      return std::pair(a.colour[box.channel], a.colour) < std::pair(b.colour[box.channel], b.colour);
    });
    const int64_t total =
        std::accumulate(begin, end, int64_t{0}, [](int64_t n, const Counted& c) { return n + c.count; });
    size_t middle = box.begin;
    for (int64_t n = 0; middle + 1 < box.end && (middle == box.begin || 2 * n < total);) n += all[middle++].count;
    *widest = box_of(all, box.begin, middle);
    boxes.push_back(box_of(all, middle, box.end));
  }
  std::vector<Colour> palette;
  for (const Box& box : boxes) {
    std::array<int64_t, 3> sums = {};
    int64_t count = 0;
    for (size_t i = box.begin; i < box.end; ++i) {
      const Counted& c = all[i];
      for (size_t k = 0; k < 3; ++k) sums[k] += c.colour[k] * c.count;
      count += c.count;
      place[key_of(c.colour.data())] = static_cast<uint8_t>(palette.size());
    }
    Colour mean;
    for (size_t k = 0; k < 3; ++k) mean[k] = static_cast<uint8_t>((sums[k] + count / 2) / count);
    palette.push_back(mean);
  }
  return palette;
}

void put16(std::string& out, int64_t v) {
  out += static_cast<char>(v & 255);
  out += static_cast<char>(v >> 8 & 255);
}

/// Codes of increasing width, least significant bit first, in blocks of at most 255 bytes.
class Bits {
 public:
  explicit Bits(std::string& out) : out_(out) {}
  void put(uint32_t code, int length) {
    held_ |= static_cast<uint64_t>(code) << count_;
    for (count_ += length; count_ >= 8; count_ -= 8, held_ >>= 8) add(static_cast<char>(held_ & 255));
  }
  void finish() {
    if (count_ > 0) add(static_cast<char>(held_ & 255));
    flush();
    out_ += '\0';
  }

 private:
  void add(char byte) {
    block_ += byte;
    if (block_.size() == 255) flush();
  }
  void flush() {
    if (block_.empty()) return;
    out_ += static_cast<char>(block_.size());
    out_ += std::exchange(block_, {});
  }
  std::string& out_;
  std::string block_;
  uint64_t held_ = 0;
  int count_ = 0;
};

/// GIF's LZW: new strings get codes until there are 4096, then the table is reset.
void put_pixels(std::string& out, const std::vector<uint8_t>& pixels) {
  constexpr uint32_t kClear = 256, kEnd = 257, kFirst = 258, kMost = 4096;
  out += '\x08';
  Bits bits(out);
  std::unordered_map<uint32_t, uint32_t> codes;  // a string is the code of its prefix and its last pixel
  uint32_t next = kFirst;
  int length = 9;
  bits.put(kClear, length);
  uint32_t now = pixels[0];
  for (size_t i = 1; i < pixels.size(); ++i) {
    const uint32_t longer = now << 8 | pixels[i];
    if (const auto it = codes.find(longer); it != codes.end()) {
      now = it->second;
      continue;
    }
    bits.put(now, length);
    now = pixels[i];
    if (next == kMost) {
      bits.put(kClear, length);
      codes.clear();
      next = kFirst, length = 9;
      continue;
    }
    if (next == uint32_t{1} << length) ++length;
    codes[longer] = next++;
  }
  bits.put(now, length);
  if (next == uint32_t{1} << length && length < 12) ++length;
  bits.put(kEnd, length);
  bits.finish();
}

}  // namespace

std::string encode_gif(const HostArray& frames, double fps) {
  const Dims& d = frames.dims();
  check(d.size() == 4 && d[3] == 3 && d[0] > 0 && d[1] > 0 && d[2] > 0 && d[1] < 65536 && d[2] < 65536 &&
            frames.dtype() == DType::u8 && fps > 0,
        Code::internal, "encode_gif: {} at {} frames per second; expected u8 [F, H, W, 3]", to_string(frames.shape()),
        fps);
  const auto v = frames.view<uint8_t>();
  std::map<uint32_t, int64_t> counts;
  for (size_t i = 0; i < v.size(); i += 3) ++counts[key_of(&v[i])];
  std::vector<Counted> colours;
  for (const auto& [key, count] : counts)
    colours.push_back(
        {{static_cast<uint8_t>(key >> 16), static_cast<uint8_t>(key >> 8), static_cast<uint8_t>(key)}, count});
  std::unordered_map<uint32_t, uint8_t> place;
  std::vector<Colour> palette = palette_of(std::move(colours), place);
  palette.resize(kColours);

  std::string out = "GIF89a";
  put16(out, d[2]), put16(out, d[1]);
  out += std::string("\xf7\0\0", 3);  // one palette of 256 colours for all frames
  for (const Colour& c : palette) out.append(c.begin(), c.end());
  out += std::string("\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0", 19);  // loops forever
  const int64_t delay = std::clamp<int64_t>(std::llround(100 / fps), 2, 65535);
  const auto pixels = static_cast<size_t>(d[1] * d[2]);
  std::vector<uint8_t> places(pixels);
  for (int64_t f = 0; f < d[0]; ++f) {
    out += std::string("\x21\xf9\x04\0", 4);
    put16(out, delay);
    out += std::string("\0\0\x2c\0\0\0\0", 7);
    put16(out, d[2]), put16(out, d[1]);
    out += '\0';
    const uint8_t* from = v.data() + static_cast<size_t>(f) * pixels * 3;
    for (size_t i = 0; i < pixels; ++i) places[i] = place.at(key_of(from + 3 * i));
    put_pixels(out, places);
  }
  return out + ';';
}

}  // namespace md
