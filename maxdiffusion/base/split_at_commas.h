// Lists that may be written as one text.
#pragma once

#include <string>
#include <vector>

namespace md {

/// Entries, each of which may hold several between commas; without spaces around them, and without empty ones.
std::vector<std::string> split_at_commas(const std::vector<std::string>& texts);

}  // namespace md
