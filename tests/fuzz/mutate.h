// Damages files as disks, transfers, editors and attackers do.
#pragma once

#include <random>
#include <string>
#include <vector>

namespace md {

using Random = std::mt19937_64;

/// Returns a copy with one to four changes: flipped bits, overwritten bytes or numbers, parts removed, repeated or
/// inserted, or a truncated end; in text files also numbers and words replaced by ones that often break programs.
std::string damaged(const std::string& whole, Random& random);

/// Texts of JSON, YAML and TOML whose values nest so deeply, or stand for so many, that readers without limits crash or
/// fill the memory; and headers of safetensors of the same texts.
std::vector<std::string> hostile_texts();

}  // namespace md
