// Damage done to files: what disks, transfers, editors and enemies do.
#pragma once

#include <random>
#include <string>

namespace md {

using Random = std::mt19937_64;

/// A damaged copy: one to four of flipped bits, bytes and numbers overwritten, parts cut out, repeated or put in, the
/// end cut off; in texts also numbers and words replaced by ones that programs trip over.
std::string damaged(const std::string& whole, Random& random);

}  // namespace md
