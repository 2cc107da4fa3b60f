#include "maxdiffusion/storage/tfrecord.h"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace md {
namespace {

// Reflected, polynomial 0x1EDC6F41.
constexpr std::array<uint32_t, 256> kTable = [] {
  std::array<uint32_t, 256> t{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1) ? 0x82F63B78u : 0u);
    t[i] = c;
  }
  return t;
}();

uint32_t by_table(uint32_t c, const char* p, size_t n) {
  for (; n > 0; --n) c = kTable[(c ^ static_cast<uint8_t>(*p++)) & 0xff] ^ (c >> 8);
  return c;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t c, const char* p, size_t n) {
  uint64_t wide = c, word = 0;
  for (; n >= 8; n -= 8, p += 8) {
    std::memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  return by_table(static_cast<uint32_t>(wide), p, n);
}
#endif

}  // namespace

uint32_t crc32c(std::string_view bytes) {
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return ~by_instruction(~0u, bytes.data(), bytes.size());
#endif
  return ~by_table(~0u, bytes.data(), bytes.size());
}

uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t c = crc32c(bytes);
  return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

void append_tfrecord(std::string& file, std::string_view record) {
  const uint64_t length = record.size();
  const auto add = [&](const auto& value) { file.append(reinterpret_cast<const char*>(&value), sizeof value); };
  add(length);
  add(masked_crc32c({reinterpret_cast<const char*>(&length), sizeof length}));
  file += record;
  add(masked_crc32c(record));
}

}  // namespace md
