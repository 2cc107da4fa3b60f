// Texts of unknown length in messages.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// UTF-8 text of `most` bytes at most, and what was left out: "a red hea… (3145728 bytes)".
std::string shortened(std::string_view text, size_t most = 200);
/// "1 picture", "2 pictures".
std::string counted(int64_t n, std::string_view one);

}  // namespace md
