// Strict framing of HTTP/1.1 requests (RFC 9112): what proxies and servers may read differently is refused, so that a
// proxy before the server and the server never disagree where a request ends or for which host it is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace md {

struct HeadFraming {
  std::string error;  // empty: the head is well formed
  bool chunked = false;
};
/// `head`: the request line and the headers, up to and with the empty line.
HeadFraming check_head(std::string_view head);

/// Follows the bytes of a chunked body.
class ChunkFraming {
 public:
  /// Whether the bytes may follow those before; false from the first byte on that may not.
  bool takes(std::string_view bytes);

 private:
  enum class At {
    size,
    extension,
    size_end,
    data,
    data_end,
    data_line,
    trailer,
    trailer_end,
    done,
    broken
  } at_ = At::size;
  uint64_t size_ = 0;
  int digits_ = 0;
  bool empty_line_ = true;  // in the trailer
};

}  // namespace md
