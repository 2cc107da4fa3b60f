// Lists that may be written as one comma-separated text.
#pragma once

#include <string>
#include <vector>

namespace md {

/// Splits each text at commas. Entries lose surrounding spaces; empty ones are dropped.
std::vector<std::string> split_at_commas(const std::vector<std::string>& texts);

/// The same for paths, whose names may contain commas: one text that is the path of a file or folder stays whole.
std::vector<std::string> split_paths(const std::vector<std::string>& texts);

}  // namespace md
