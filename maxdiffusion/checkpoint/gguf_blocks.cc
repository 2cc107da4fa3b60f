#include "maxdiffusion/checkpoint/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "maxdiffusion/base/half.h"
#include "maxdiffusion/base/parallel.h"

namespace md {
namespace {

constexpr int kSmall = 32, kLarge = 256;  // numbers per block: of the older types, and of the K types

int byte_at(const std::byte* p, int i) { return std::to_integer<int>(p[i]); }
float half_at(const std::byte* p) {
  uint16_t bits = 0;
  std::memcpy(&bits, p, sizeof bits);
  return f16_to_float(bits);
}
void put_half(std::byte* p, float v) {
  const uint16_t bits = float_to_f16(v);
  std::memcpy(p, &bits, sizeof bits);
}
uint32_t word_at(const std::byte* p) {
  uint32_t bits = 0;
  std::memcpy(&bits, p, sizeof bits);
  return bits;
}

// ---- Blocks of 32 numbers: a scale, for some types a minimum, for some a fifth bit of each number, then the numbers.
// The low nibbles of the 16 bytes are the first 16 numbers, the high nibbles the others.

void read_q8_0(const std::byte* b, float* y) {
  const float scale = half_at(b);
  for (int i = 0; i < kSmall; ++i) y[i] = static_cast<float>(static_cast<int8_t>(byte_at(b, 2 + i))) * scale;
}

template <int bits, bool minimum>
void read_small(const std::byte* b, float* y) {
  const float scale = half_at(b), low = minimum ? half_at(b + 2) : 0;
  const std::byte* rest = b + (minimum ? 4 : 2);
  const uint32_t fifth = bits == 5 ? word_at(rest) : 0;
  const std::byte* q = rest + (bits == 5 ? 4 : 0);
  for (int i = 0; i < kSmall; ++i) {
    const int byte = byte_at(q, i % 16), nibble = i < 16 ? byte & 15 : byte >> 4;
    const int number = nibble | static_cast<int>((fifth >> i & 1) << 4);
    if constexpr (minimum)
      y[i] = static_cast<float>(number) * scale + low;
    else
      y[i] = static_cast<float>(number - (1 << (bits - 1))) * scale;
  }
}

void write_q8_0(const float* x, std::byte* b) {
  float most = 0;
  for (int i = 0; i < kSmall; ++i) most = std::max(most, std::fabs(x[i]));
  const float scale = most / 127, inverse = scale == 0 ? 0 : 1 / scale;
  put_half(b, scale);
  for (int i = 0; i < kSmall; ++i) b[2 + i] = static_cast<std::byte>(static_cast<int>(std::round(x[i] * inverse)));
}

void write_q4_0(const float* x, std::byte* b) {
  float most = 0;  // the number with the largest magnitude, which becomes −8
  for (int i = 0; i < kSmall; ++i)
    if (std::fabs(x[i]) > std::fabs(most)) most = x[i];
  const float scale = most / -8, inverse = scale == 0 ? 0 : 1 / scale;
  put_half(b, scale);
  std::array<int, kSmall> q{};
  for (int i = 0; i < kSmall; ++i)
    q[static_cast<size_t>(i)] = std::clamp(
        static_cast<int>(static_cast<float>(static_cast<double>(x[i]) * static_cast<double>(inverse) + 8.5)), 0, 15);
  for (int i = 0; i < 16; ++i)
    b[2 + i] = static_cast<std::byte>(q[static_cast<size_t>(i)] | q[static_cast<size_t>(i) + 16] << 4);
}

// ---- Nibbles that are places in a table of numbers. The low nibbles of 16 bytes are the first 16 numbers.

constexpr std::array<int, 16> kNonlinear = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr std::array<int, 16> kTwiceE2M1 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void read_nibbles(const std::byte* q, const std::array<int, 16>& table, float scale, float* y) {
  for (int i = 0; i < kSmall; ++i) {
    const int byte = byte_at(q, i % 16), nibble = i < 16 ? byte & 15 : byte >> 4;
    y[i] = scale * static_cast<float>(table[static_cast<size_t>(nibble)]);
  }
}

void read_iq4_nl(const std::byte* b, float* y) { read_nibbles(b + 2, kNonlinear, half_at(b), y); }

/// Float4 (E2M1) with a power of two as the scale of 32 numbers (E8M0, biased by 127).
void read_mxfp4(const std::byte* b, float* y) {
  read_nibbles(b + 1, kTwiceE2M1, std::ldexp(1.0F, byte_at(b, 0) - 128), y);
}

void read_iq4_xs(const std::byte* b, float* y) {
  const int high = byte_at(b, 2) | byte_at(b, 3) << 8;
  for (int j = 0; j < kLarge / 32; ++j) {
    const int low = byte_at(b, 4 + j / 2) >> (j % 2 * 4) & 15, scale = (low | (high >> (2 * j) & 3) << 4) - 32;
    read_nibbles(b + 8 + 16 * j, kNonlinear, half_at(b) * static_cast<float>(scale), y + 32 * j);
  }
}

// ---- Blocks of 256 numbers, in groups of 32 or 16 with their own scales of few bits.

/// The two bits of number `i` of a block: byte k holds the numbers k % 32 + 128 (k / 32) and the 32nd, 64th and 96th
/// after it.
int two_bits(const std::byte* q, int i) { return byte_at(q, i / 128 * 32 + i % 32) >> (i % 128 / 32 * 2) & 3; }

void read_q2_k(const std::byte* b, float* y) {
  const std::byte *scales = b, *q = b + 16;
  const float scale = half_at(b + 80), low = half_at(b + 82);
  for (int i = 0; i < kLarge; ++i) {
    const int group = byte_at(scales, i / 16);
    const float by = scale * static_cast<float>(group & 15), less = low * static_cast<float>(group >> 4);
    y[i] = by * static_cast<float>(two_bits(q, i)) - less;
  }
}

/// Sixteen scales of six bits: four bits in the first eight bytes, low nibbles first, and two in the last four.
void read_q3_k(const std::byte* b, float* y) {
  const std::byte *high = b, *q = b + 32, *scales = b + 96;
  const float scale = half_at(b + 108);
  for (int i = 0; i < kLarge; ++i) {
    const int j = i / 16, low = byte_at(scales, j % 8) >> (j / 8 * 4) & 15;
    const int group = (low | (byte_at(scales, 8 + j % 4) >> (j / 4 * 2) & 3) << 4) - 32;
    const int number = two_bits(q, i) - ((byte_at(high, i % 32) >> (i / 32) & 1) == 0 ? 4 : 0);
    y[i] = scale * static_cast<float>(group) * static_cast<float>(number);
  }
}

/// −1, 0 and 1, as two bits.
void read_tq2_0(const std::byte* b, float* y) {
  const float scale = half_at(b + 64);
  for (int i = 0; i < kLarge; ++i) y[i] = scale * static_cast<float>(two_bits(b, i) - 1);
}

/// −1, 0 and 1, as digits of base 3. A byte is a fraction of 256 with up to five digits, the first of which is its
/// threefold's whole part. 32 bytes hold digits of 32 numbers each, 16 bytes of 16 and the last four of 4.
void read_tq1_0(const std::byte* b, float* y) {
  const float scale = half_at(b + 52);
  const auto digits = [&](int first, int bytes, int digits) {
    for (int digit = 0, power = 1; digit < digits; ++digit, power *= 3)
      for (int i = 0; i < bytes; ++i)
        *y++ = scale * static_cast<float>((byte_at(b, first + i) * power % 256 * 3 / 256) - 1);
  };
  digits(0, 32, 5);
  digits(32, 16, 5);
  digits(48, 4, 4);
}

struct ScaleAndMinimum {
  int scale, minimum;
};
/// Scale and minimum of group `j` of eight, each of six bits, packed in twelve bytes. Groups 0 to 3 are the low six
/// bits of the first eight bytes; groups 4 to 7 have four bits in the last four bytes and two in the high bits of the
/// first eight.
ScaleAndMinimum group_of(const std::byte* s, int j) {
  if (j < 4) return {byte_at(s, j) & 63, byte_at(s, j + 4) & 63};
  return {(byte_at(s, j + 4) & 15) | (byte_at(s, j - 4) >> 6) << 4, byte_at(s, j + 4) >> 4 | (byte_at(s, j) >> 6) << 4};
}

template <bool fifth>
void read_q45_k(const std::byte* b, float* y) {
  const float scale = half_at(b), low = half_at(b + 2);
  const std::byte *scales = b + 4, *high = b + 16, *q = fifth ? high + 32 : high;
  for (int j = 0; j < kLarge / 32; ++j) {
    const ScaleAndMinimum g = group_of(scales, j);
    const float by = scale * static_cast<float>(g.scale), less = low * static_cast<float>(g.minimum);
    for (int i = 0; i < 32; ++i) {
      const int byte = byte_at(q, j / 2 * 32 + i);
      int number = j % 2 == 0 ? byte & 15 : byte >> 4;
      if constexpr (fifth) number |= (byte_at(high, i) >> j & 1) << 4;
      y[j * 32 + i] = by * static_cast<float>(number) - less;
    }
  }
}

void read_q6_k(const std::byte* b, float* y) {
  const std::byte *low = b, *high = b + 128, *scales = b + 192;
  const float scale = half_at(b + 208);
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 4; ++j)  // 32 numbers: four bits of the low bytes, two of the high ones
      for (int i = 0; i < 32; ++i) {
        const int byte = byte_at(low, half * 64 + j % 2 * 32 + i);
        const int four = j < 2 ? byte & 15 : byte >> 4, two = byte_at(high, half * 32 + i) >> (2 * j) & 3;
        const int number = (four | two << 4) - 32, place = half * 128 + j * 32 + i;
        const auto group = static_cast<int8_t>(byte_at(scales, place / 16));
        y[place] = scale * static_cast<float>(group) * static_cast<float>(number);
      }
}

constexpr std::array kTypes = {
    GgufType{.id = 0, .name = "F32", .bytes = 4, .plain = true, .dtype = DType::f32},
    GgufType{.id = 1, .name = "F16", .bytes = 2, .plain = true, .dtype = DType::f16},
    GgufType{.id = 2, .name = "Q4_0", .numbers = 32, .bytes = 18, .read = read_small<4, false>, .write = write_q4_0},
    GgufType{.id = 3, .name = "Q4_1", .numbers = 32, .bytes = 20, .read = read_small<4, true>},
    GgufType{.id = 6, .name = "Q5_0", .numbers = 32, .bytes = 22, .read = read_small<5, false>},
    GgufType{.id = 7, .name = "Q5_1", .numbers = 32, .bytes = 24, .read = read_small<5, true>},
    GgufType{.id = 8, .name = "Q8_0", .numbers = 32, .bytes = 34, .read = read_q8_0, .write = write_q8_0},
    GgufType{.id = 9, .name = "Q8_1"},
    GgufType{.id = 10, .name = "Q2_K", .numbers = 256, .bytes = 84, .read = read_q2_k},
    GgufType{.id = 11, .name = "Q3_K", .numbers = 256, .bytes = 110, .read = read_q3_k},
    GgufType{.id = 12, .name = "Q4_K", .numbers = 256, .bytes = 144, .read = read_q45_k<false>},
    GgufType{.id = 13, .name = "Q5_K", .numbers = 256, .bytes = 176, .read = read_q45_k<true>},
    GgufType{.id = 14, .name = "Q6_K", .numbers = 256, .bytes = 210, .read = read_q6_k},
    GgufType{.id = 15, .name = "Q8_K"},
    GgufType{.id = 16, .name = "IQ2_XXS"},
    GgufType{.id = 17, .name = "IQ2_XS"},
    GgufType{.id = 18, .name = "IQ3_XXS"},
    GgufType{.id = 19, .name = "IQ1_S"},
    GgufType{.id = 20, .name = "IQ4_NL", .numbers = 32, .bytes = 18, .read = read_iq4_nl},
    GgufType{.id = 21, .name = "IQ3_S"},
    GgufType{.id = 22, .name = "IQ2_S"},
    GgufType{.id = 23, .name = "IQ4_XS", .numbers = 256, .bytes = 136, .read = read_iq4_xs},
    GgufType{.id = 24, .name = "I8", .bytes = 1, .plain = true, .dtype = DType::s8},
    GgufType{.id = 25, .name = "I16", .bytes = 2, .plain = true, .dtype = DType::s16},
    GgufType{.id = 26, .name = "I32", .bytes = 4, .plain = true, .dtype = DType::s32},
    GgufType{.id = 27, .name = "I64", .bytes = 8, .plain = true, .dtype = DType::s64},
    GgufType{.id = 28, .name = "F64", .bytes = 8, .plain = true, .dtype = DType::f64},
    GgufType{.id = 29, .name = "IQ1_M"},
    GgufType{.id = 30, .name = "BF16", .bytes = 2, .plain = true, .dtype = DType::bf16},
    GgufType{.id = 34, .name = "TQ1_0", .numbers = 256, .bytes = 54, .read = read_tq1_0},
    GgufType{.id = 35, .name = "TQ2_0", .numbers = 256, .bytes = 66, .read = read_tq2_0},
    GgufType{.id = 39, .name = "MXFP4", .numbers = 32, .bytes = 17, .read = read_mxfp4},
};

const GgufType* first_type(auto&& is) {
  const auto* found = std::ranges::find_if(kTypes, is);
  return found == kTypes.end() ? nullptr : &*found;
}

/// Calls f(first block, one past the last) for ranges of blocks, on all cores.
void in_parts(int64_t blocks, auto&& f) {
  constexpr int64_t kBlocks = 4096;
  parallel_for((blocks + kBlocks - 1) / kBlocks,
               [&](int64_t part, int) { f(part * kBlocks, std::min(blocks, (part + 1) * kBlocks)); });
}

}  // namespace

const GgufType* find_gguf_type(uint32_t id) {
  return first_type([&](const GgufType& t) { return t.id == id; });
}
const GgufType* gguf_type_of(DType type) {
  return first_type([&](const GgufType& t) { return t.plain && t.dtype == type; });
}
const GgufType* find_written_gguf_type(std::string_view name) {
  return first_type([&](const GgufType& t) {
    return t.write && std::ranges::equal(t.name, name, {}, [](char c) {
             return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 'a' - 'A') : c;
           });
  });
}
std::vector<std::string_view> gguf_type_names() {
  std::vector<std::string_view> names;
  for (const GgufType& t : kTypes)
    if (t.plain || t.read) names.push_back(t.name);
  return names;
}

void read_gguf_blocks(const GgufType& type, const std::byte* from, int64_t blocks, float* to) {
  in_parts(blocks, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) type.read(from + i * type.bytes, to + i * type.numbers);
  });
}
void write_gguf_blocks(const GgufType& type, const float* from, int64_t blocks, std::byte* to) {
  in_parts(blocks, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; ++i) type.write(from + i * type.numbers, to + i * type.bytes);
  });
}

}  // namespace md
