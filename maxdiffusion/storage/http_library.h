// HTTP through libcurl and digests through OpenSSL, in a separate shared library (maxdiffusion/storage/http/) that is
// opened on the first download. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace md {

struct HttpRequest {
  std::string url;
  std::string token;            // sent as a bearer token, to the host of `url` only; empty: none
  int64_t offset = 0;           // first byte of the body, by a Range header
  bool local_addresses = true;  // false: refuses hosts of this machine and of private networks
};

struct HttpAnswer {
  int64_t status = 0;                          // HTTP status; 0: no complete answer, see `failure`
  std::map<std::string, std::string> headers;  // of the last answer, by lower-case name
  std::string error_body;                      // of a status other than 200 and 206, its first 64 KiB
  std::string failure;                         // error message
};

/// A digest of bytes that are added in chunks.
class Digest {
 public:
  virtual ~Digest() = default;
  virtual void add(std::string_view bytes) = 0;
  /// In hexadecimal digits. Called once, at the end.
  virtual std::string hex() = 0;
};

class HttpLibrary {
 public:
  virtual ~HttpLibrary() = default;
  /// Receives the bytes of an answer with `status` 200 or 206, in order; false ends the transfer.
  using Body = std::function<bool(int64_t status, std::string_view bytes)>;
  /// GET. Follows redirects, but not from https to http nor to other schemes. Throws what `body` throws.
  virtual HttpAnswer get(const HttpRequest& request, const Body& body) const = 0;
  /// `name`: "sha256" or "sha1".
  virtual std::unique_ptr<Digest> digest(const char* name) const = 0;
};

/// Opens the library on first use. Throws io naming it.
HttpLibrary& http_library();

}  // namespace md
