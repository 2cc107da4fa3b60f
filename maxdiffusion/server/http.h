// HTTP/1.1 by cpp-httplib, in a separate shared library (maxdiffusion/server/http/) that is opened when the server
// starts. Each connection serves one request and is then closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace md {

/// A part of a body of multipart/form-data.
struct HttpPart {
  std::string name, file_name, type, bytes;
};

struct HttpCall {
  std::string method, path;                    // decoded, without the query
  std::map<std::string, std::string> query;    // first value of each name, decoded
  std::map<std::string, std::string> headers;  // by lower-case name, first value of each
  std::string body;                            // empty for multipart/form-data
  std::vector<HttpPart> parts;
  enum class Body { whole, too_large, malformed } state = Body::whole;  // the body is only set if whole
  /// Whether the client is still connected. Call it on the handler's thread.
  std::function<bool()> connected;
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json", body;
  std::map<std::string, std::string> headers = {};
  /// Instead of body: sends text as it is produced, until it returns; `send` returns false once the client is gone.
  using Send = std::function<bool(std::string_view)>;
  std::function<void(const Send& send)> stream = {};
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  int64_t port = 0;                     // 0: any free port
  size_t max_body = 0, max_parts = 64;  // max_body: bytes after decompression; bytes above are read and discarded
  size_t max_head = size_t{1} << 16;    // bytes of the request line and headers; the connection is closed above it
  int64_t connections = 256;            // at a time; others wait
  int64_t request_seconds = 60;         // until a whole request has arrived
  int64_t idle_seconds = 30;            // without a byte read or written
};

/// Called on a separate thread for each connection; an exception is a defect and answered 500.
using HttpHandler = std::function<HttpReply(const HttpCall&)>;

class HttpListener {
 public:
  virtual ~HttpListener() = default;
  virtual int64_t port() const = 0;
  /// Serves until stop(); returns when all connections are closed, without waiting for data that clients still send.
  virtual void run(const HttpHandler& handler) = 0;
  /// May be called from any thread.
  virtual void stop() = 0;
};

class ListenLibrary {
 public:
  virtual ~ListenLibrary() = default;
  /// Binds the port. Throws io, naming host and port.
  virtual std::unique_ptr<HttpListener> listen(const HttpOptions& options) const = 0;
};

/// Opens the library on first use. Throws io naming it.
ListenLibrary& listen_library();

}  // namespace md
