// The only file that includes cpp-httplib. The library parses requests, bodies and their parts, and formats answers.
// This file does the socket I/O, because the library (0.11) has no limits for the time of a whole request, the size of
// its head, and chunked or compressed bodies, and does not check whether the client is still connected.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/lower_case.h"
#include "maxdiffusion/server/http.h"
#include "maxdiffusion/server/http/framing.h"

namespace md {
namespace {

using Clock = std::chrono::steady_clock;

/// The byte stream of a connection.
class Connection final : public httplib::Stream {
 public:
  Connection(int socket, const HttpOptions& options, const std::atomic<bool>& stopping)
      : socket_(socket),
        options_(options),
        stopping_(stopping),
        until_(Clock::now() + std::chrono::seconds(options.request_seconds)) {}

  bool is_connected() const {
    char c = 0;
    const ssize_t n = ::recv(socket_, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  }

  bool is_readable() const override { return true; }
  bool is_writable() const override { return is_connected(); }
  ssize_t read(char* to, size_t size) override {
    if (head_.empty() && !read_head()) return -1;
    if (head_at_ < head_.size()) {  // the library reads lines byte by byte
      const size_t n = std::min(size, head_.size() - head_at_);
      std::copy_n(head_.data() + head_at_, n, to);
      head_at_ += n;
      return static_cast<ssize_t>(n);
    }
    if (at_ == end_)
      if (const ssize_t n = fill(); n <= 0) return n;
    const size_t n = std::min(size, end_ - at_);
    if (chunked_ && !chunks_.takes({buffer_.data() + at_, n})) return -1;
    std::copy_n(buffer_.data() + at_, n, to);
    at_ += n;
    return static_cast<ssize_t>(n);
  }
  ssize_t write(const char* from, size_t size) override {
    while (wait(POLLOUT, Clock::time_point::max())) {
      const ssize_t n = ::send(socket_, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return n;
    }
    return -1;
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { address(::getpeername, ip, port); }
  void get_local_ip_and_port(std::string& ip, int& port) const override { address(::getsockname, ip, port); }
  int socket() const override { return 0; }  // the library would call select on it

 private:
  ssize_t fill() {
    if (!wait(POLLIN, until_)) return -1;
    const ssize_t n = ::recv(socket_, buffer_.data(), buffer_.size(), 0);
    if (n > 0) at_ = 0, end_ = static_cast<size_t>(n);
    return n;
  }
  /// Reads the whole head; answers 400 and returns false unless it is well formed.
  bool read_head() {
    while (!head_.ends_with("\r\n\r\n")) {
      if (at_ == end_ && fill() <= 0) return false;
      if (head_.size() >= options_.max_head) return false;
      head_ += buffer_[at_++];
      if (head_.ends_with("\n\n") || head_.ends_with("\n\r\n")) break;
    }
    const HeadFraming framing = check_head(head_);
    chunked_ = framing.chunked;
    if (framing.error.empty()) return true;
    const std::string body = fmt::format(R"({{"error": {{"message": "{}"}}, "detail": "{}"}})", framing.error,
                                         framing.error),
                      text = fmt::format(
                          "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: "
                          "{}\r\nConnection: close\r\n\r\n{}",
                          body.size(), body);
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t n = write(rest.data(), rest.size());
      if (n <= 0) break;
      rest.remove_prefix(static_cast<size_t>(n));
    }
    return false;
  }
  template <class Name>
  void address(Name name, std::string& ip, int& port) const {
    sockaddr_storage a{};
    socklen_t length = sizeof a;
    if (name(socket_, reinterpret_cast<sockaddr*>(&a), &length) != 0) return;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const void* bytes = a.ss_family == AF_INET6
                            ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(&a)->sin6_addr)
                            : static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(&a)->sin_addr);
    if (::inet_ntop(a.ss_family, bytes, text.data(), text.size())) ip = text.data();
    port = ntohs(reinterpret_cast<const sockaddr_in*>(&a)->sin_port);
  }
  /// Waits until the socket is ready; false: timeout, or the server stops. A stopping server gives answers three more
  /// seconds.
  bool wait(short what, Clock::time_point until) {
    until = std::min(until, Clock::now() + std::chrono::seconds(options_.idle_seconds));
    while (Clock::now() < until) {
      if (stopping_ && what == POLLIN) return false;
      if (stopping_) until = until_ = std::min(until_, Clock::now() + std::chrono::seconds(3));
      pollfd p{.fd = socket_, .events = what, .revents = 0};
      const int ready = ::poll(&p, 1, 100);
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
    return false;
  }

  int socket_;
  const HttpOptions& options_;
  const std::atomic<bool>& stopping_;
  Clock::time_point until_;
  std::string head_;
  ChunkFraming chunks_;
  bool chunked_ = false;
  size_t head_at_ = 0, at_ = 0, end_ = 0;
  std::array<char, 16384> buffer_{};
};

thread_local Connection* connection = nullptr;  // connection of the request that this thread answers

/// One thread per connection, up to the limit of simultaneous connections.
class Threads final : public httplib::TaskQueue {
 public:
  explicit Threads(int64_t most) : most_(static_cast<size_t>(most)) {}
  void enqueue(std::function<void()> task) override {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ < tasks_.size() && threads_.size() < most_) threads_.emplace_back([this] { work(); });
    changed_.notify_one();
  }
  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [&] { return done_ || !tasks_.empty(); });
      --idle_;
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t most_, idle_ = 0;
  bool done_ = false;
};

class Server final : public httplib::Server {
 public:
  explicit Server(const HttpOptions& options) : options_(options) {
    new_task_queue = [this] { return new Threads(options_.connections); };
    set_payload_max_length(options_.max_body);
  }
  void stop_serving() {
    stopping_ = true;
    stop();
  }

 private:
  bool process_and_close_socket(socket_t socket) override {
    Connection stream(socket, options_, stopping_);
    connection = &stream;
    bool closed = false;
    const bool ok = process_request(stream, true, closed, nullptr);
    connection = nullptr;
    // Reads what the client still sends for a moment, so that the answer reaches it.
    ::shutdown(socket, SHUT_WR);
    timeval moment{.tv_sec = 1, .tv_usec = 0};
    ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment);
    std::array<char, 16384> rest{};
    for (const auto until = Clock::now() + std::chrono::seconds(2);
         !stopping_ && Clock::now() < until && ::recv(socket, rest.data(), rest.size(), 0) > 0;) {
    }
    ::close(socket);
    return ok;
  }
  HttpOptions options_;
  std::atomic<bool> stopping_ = false;
};

HttpCall call_of(const httplib::Request& r) {
  HttpCall call{.method = r.method, .path = r.path, .connected = [] { return connection->is_connected(); }};
  for (const auto& [name, value] : r.params) call.query.emplace(name, value);
  for (const auto& [name, value] : r.headers) call.headers.emplace(lower_case(name), value);
  return call;
}

void answer(HttpReply reply, httplib::Response& out) {
  out.status = reply.status;
  for (const auto& [name, value] : reply.headers) out.set_header(name, value);
  if (!reply.stream) return out.set_content(reply.body, reply.type);
  out.set_chunked_content_provider(reply.type, [stream = std::move(reply.stream)](size_t, httplib::DataSink& sink) {
    stream([&](std::string_view text) { return sink.write(text.data(), text.size()) && sink.is_writable(); });
    sink.done();
    return true;
  });
}

/// Reads the body into the call unless it is too large.
void read_body(const httplib::Request& r, const httplib::Response& out, const httplib::ContentReader& content,
               const HttpOptions& o, HttpCall& call) {
  if (!r.has_header("Content-Length") && !r.has_header("Transfer-Encoding")) return;  // else it reads until the end
  size_t size = 0;
  const auto takes = [&](size_t n) {
    size += n;
    if (size > o.max_body) call.state = HttpCall::Body::too_large;
    return call.state == HttpCall::Body::whole;
  };
  bool read = false;
  if (r.is_multipart_form_data())
    read = content(
        [&](const httplib::MultipartFormData& part) {
          if (call.parts.size() >= o.max_parts) call.state = HttpCall::Body::too_large;
          if (call.state != HttpCall::Body::whole) return false;
          call.parts.push_back({part.name, part.filename, part.content_type, ""});
          return true;
        },
        [&](const char* data, size_t n) {
          if (!takes(n)) return false;
          call.parts.back().bytes.append(data, n);
          return true;
        });
  else
    read = content([&](const char* data, size_t n) {
      if (!takes(n)) return false;
      call.body.append(data, n);
      return true;
    });
  if (!read && call.state == HttpCall::Body::whole)
    call.state = out.status == 413 ? HttpCall::Body::too_large : HttpCall::Body::malformed;
  if (call.state != HttpCall::Body::whole) call.body.clear(), call.parts.clear();
}

class Listener final : public HttpListener {
 public:
  explicit Listener(const HttpOptions& options) : options_(options), server_(options) {
    server_.set_socket_options([this](int socket) {
      int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      bound_ = socket;
    });
    if (options.port == 0)
      port_ = server_.bind_to_any_port(options.host);
    else
      port_ = server_.bind_to_port(options.host, static_cast<int>(options.port)) ? options.port : -1;
    check(bound_ >= 0, Code::invalid_config,
          "host is '{}'; expected an address or a name of this machine, such as 127.0.0.1, or 0.0.0.0 for all",
          options.host);
    if (port_ <= 0)
      throw Error(Code::io,
                  fmt::format("port {} of {} cannot be bound: {}", options.port, options.host, std::strerror(errno)))
          .note("try: another port=NUMBER, or 0 for any that is free");
    ::listen(bound_, 512);  // the library's backlog is only five connections
  }

  int64_t port() const override { return port_; }
  void stop() override { server_.stop_serving(); }

  void run(const HttpHandler& handler) override {
    server_.set_pre_routing_handler([](const httplib::Request& r, httplib::Response& out) {
      // The library matches paths with recursive regular expressions.
      if (r.path.size() <= 1024) return httplib::Server::HandlerResponse::Unhandled;
      out.status = 414;
      return httplib::Server::HandlerResponse::Handled;
    });
    server_.set_exception_handler([](const httplib::Request&, httplib::Response& out, const std::exception_ptr&) {
      out.status = 500;
      out.set_content(R"({"error": "internal error"})", "application/json");
    });
    const auto plain = [&handler](const httplib::Request& r, httplib::Response& out) {
      answer(handler(call_of(r)), out);
    };
    const auto with_body = [&handler, this](const httplib::Request& r, httplib::Response& out,
                                            const httplib::ContentReader& content) {
      HttpCall call = call_of(r);
      read_body(r, out, content, options_, call);
      out.status = -1;  // the reader sets it if it rejects a body
      answer(handler(call), out);
    };
    const char* any = R"([\s\S]*)";
    server_.Get(any, plain).Options(any, plain);
    server_.Post(any, with_body).Put(any, with_body).Patch(any, with_body).Delete(any, with_body);
    server_.listen_after_bind();
  }

 private:
  HttpOptions options_;
  Server server_;
  int bound_ = -1;
  int64_t port_ = -1;
};

class Library final : public ListenLibrary {
 public:
  std::unique_ptr<HttpListener> listen(const HttpOptions& options) const override {
    return std::make_unique<Listener>(options);
  }
};

}  // namespace
}  // namespace md

extern "C" md::ListenLibrary* md_listen_library() {
  static md::Library library;
  return &library;
}
