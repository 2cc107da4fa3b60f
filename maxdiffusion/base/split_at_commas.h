// Lists that may be written as one comma-separated text.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace md {

/// Splits a single text at commas. Entries lose surrounding spaces; empty ones are dropped. Several texts were given as
/// a list, and stay as they are.
std::vector<std::string> split_at_commas(const std::vector<std::string>& texts);

/// Splits at the commas outside of names: from the start, the longest part of which `is_one` says that it is a name,
/// else the part before the next comma. Entries lose surrounding spaces; empty ones are dropped.
std::vector<std::string> split_where(const std::string& text, const std::function<bool(const std::string&)>& is_one);

/// The same for paths, whose names may contain commas: names of files and folders that exist stay whole.
std::vector<std::string> split_paths(const std::vector<std::string>& texts);

}  // namespace md
