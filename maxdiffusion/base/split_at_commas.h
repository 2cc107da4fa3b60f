// Lists that may be written as one comma-separated text.
#pragma once

#include <string>
#include <vector>

namespace md {

/// Splits each text at commas. Entries lose surrounding spaces; empty ones are dropped.
std::vector<std::string> split_at_commas(const std::vector<std::string>& texts);

}  // namespace md
