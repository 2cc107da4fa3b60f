// Texts of unknown length in messages.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// UTF-8 text truncated to at most `most` bytes, with the full size: "a red hea… (3145728 bytes)".
std::string shortened(std::string_view text, size_t most = 200);
/// "1 image", "2 images".
std::string counted(int64_t n, std::string_view one);

}  // namespace md
