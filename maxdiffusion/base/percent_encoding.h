// Percent-encoding of URLs (RFC 3986, section 2.1).
#pragma once

#include <string>
#include <string_view>

namespace md {

/// A path as it stands in a URL: all bytes but letters, digits and "-._~/" as %XX.
std::string percent_encoded(std::string_view path);

}  // namespace md
