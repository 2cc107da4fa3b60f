#include "maxdiffusion/base/layer_path.h"

#include <charconv>

#include "maxdiffusion/base/error.h"

namespace md {

std::string stacked_part(int64_t first) { return first == 0 ? "*" : "*+" + std::to_string(first); }

bool is_stacked(const std::string& path) { return path.find('*') != std::string::npos; }

std::string layer_path(const std::string& path, int64_t row) {
  const size_t star = path.find('*');
  check(star != std::string::npos, Code::internal, "'{}' is not the path of a stacked parameter", path);
  int64_t first = 0;
  const char *from = path.data() + star + 1, *end = path.data() + path.size();
  if (from < end && *from == '+') from = std::from_chars(from + 1, end, first).ptr;
  return path.substr(0, star) + std::to_string(first + row) + std::string(from, end);
}

}  // namespace md
