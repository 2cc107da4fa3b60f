// The nearest of known words, for messages about an unknown one.
#pragma once

#include <string>
#include <vector>

namespace md {

/// The known word nearest to `word` by edit distance, ignoring case, or "" if none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& known);
/// "euler, ddim, ddpm": the known words in their order, but the nearest to `word` first, if one is near.
std::string nearest_first(const std::string& word, const std::vector<std::string>& known);

}  // namespace md
