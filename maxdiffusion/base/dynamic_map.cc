#include "maxdiffusion/base/dynamic_map.h"

#include <algorithm>

namespace md {
namespace {

std::array<float, 256> make_map(bool with_sign) {
  std::array<float, 256> map = {};  // the rest is 0
  size_t n = 0;
  for (int d = 0; d < kDecades; ++d)
    for (int i = 0; i < decade(d, with_sign).count; ++i) {
      map[n++] = static_cast<float>(decade(d, with_sign).number(i));
      if (with_sign) map[n++] = static_cast<float>(-decade(d, with_sign).number(i));
    }
  map[n] = 1;
  std::ranges::sort(map);
  return map;
}

}  // namespace

const std::array<float, 256>& dynamic_map(bool with_sign) {
  static const std::array<float, 256> maps[] = {make_map(false), make_map(true)};
  return maps[with_sign ? 1 : 0];
}

}  // namespace md
