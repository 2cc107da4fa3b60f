// Damages files as disks, transfers, editors and attackers do.
#pragma once

#include <random>
#include <string>

namespace md {

using Random = std::mt19937_64;

/// Returns a copy with one to four changes: flipped bits, overwritten bytes or numbers, parts removed, repeated or
/// inserted, or a truncated end; in text files also numbers and words replaced by ones that often break programs.
std::string damaged(const std::string& whole, Random& random);

}  // namespace md
