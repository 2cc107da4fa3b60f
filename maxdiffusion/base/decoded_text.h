// Texts that people write: captions, prompts, wildcards, metadata.
#pragma once

#include <string>
#include <string_view>

namespace md {

/// The text in UTF-8 without byte order mark, from bytes in UTF-8, or in UTF-16 with a byte order mark. Throws io
/// "NAME:LINE: …" for anything else. Thread safe.
std::string decoded_text(std::string_view bytes, const std::string& name);

/// The text of a file. Throws io.
std::string read_text_file(const std::string& path);

}  // namespace md
