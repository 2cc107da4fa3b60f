#include "maxdiffusion/base/split_at_commas.h"

#include "maxdiffusion/base/files.h"

#include <algorithm>

namespace md {

std::vector<std::string> split_at_commas(const std::vector<std::string>& texts) {
  std::vector<std::string> out;
  for (const std::string& text : texts)
    for (size_t begin = 0; begin <= text.size();) {
      const size_t comma = std::min(text.find(',', begin), text.size());
      std::string part = text.substr(begin, comma - begin);
      part.erase(0, part.find_first_not_of(' '));
      part.erase(part.find_last_not_of(' ') + 1);
      if (!part.empty()) out.push_back(part);
      begin = comma + 1;
    }
  return out;
}

std::vector<std::string> split_paths(const std::vector<std::string>& texts) {
  return texts.size() == 1 && exists(texts[0]) ? texts : split_at_commas(texts);
}

}  // namespace md
