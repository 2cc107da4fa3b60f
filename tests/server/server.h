// The command `serve` as a separate process, and a raw HTTP client: one connection per request.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {

using nlohmann::json;

/// A connection to a port of this machine.
class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in a{};
    a.sin_family = AF_INET, a.sin_port = htons(static_cast<uint16_t>(port)), a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0;
    timeval limit{.tv_sec = 600, .tv_usec = 0};  // the last of 64 clients of a server under a sanitizer
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  bool connected() const { return connected_; }
  bool send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  /// Receives up to `most` available bytes; empty: the end or an error.
  std::string receive(size_t most = 65536) const {
    std::string out(most, 0);
    const ssize_t n = ::recv(socket_, out.data(), most, 0);
    out.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return out;
  }
  std::string rest() const {
    std::string out;
    for (std::string part; !(part = receive()).empty();) out += part;
    return out;
  }
  int socket() const { return socket_; }
  void close() {
    if (socket_ >= 0) ::close(socket_);
    socket_ = -1;
  }

 private:
  int socket_;
  bool connected_ = false;
};

struct Answer {
  int status = 0;  // 0: no answer
  std::string head, body;
  json value() const { return parse_json_or_discard(body); }
};

/// Parses a server's answer; joins chunks.
inline Answer answer_of(const std::string& bytes) {
  Answer a;
  const size_t end = bytes.find("\r\n\r\n");
  if (end == bytes.npos || std::sscanf(bytes.c_str(), "HTTP/1.1 %d", &a.status) != 1) return a;
  a.head = bytes.substr(0, end);
  a.body = bytes.substr(end + 4);
  if (a.head.find("Transfer-Encoding: chunked") == a.head.npos) return a;
  std::string joined;
  for (size_t at = 0; at < a.body.size();) {
    const size_t size = std::stoul(a.body.substr(at), nullptr, 16), from = a.body.find("\r\n", at) + 2;
    if (size == 0) break;
    joined += a.body.substr(from, size);
    at = from + size + 2;
  }
  a.body = joined;
  return a;
}

using Headers = std::vector<std::string>;

class TestServer {
 public:
  /// `words`: arguments of `serve`; the port is any free one.
  explicit TestServer(std::vector<std::string> words, const std::vector<std::string>& environment = {}) {
    words.insert(words.begin(), {MD_BINARY_DIR "/maxdiffusion", "serve"});
    words.emplace_back("port=0");
    if (std::ranges::none_of(words, [](const std::string& w) { return w.starts_with("runs="); }))  // without models
      words.insert(words.end(), {"hardware=cpu", "activations_dtype=float32", "precision=HIGHEST",
                                 "xla_flags=--xla_backend_optimization_level=0"});
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    process_ = ::fork();
    if (process_ == 0) {
      for (const std::string& e : environment) ::putenv(const_cast<char*>(e.c_str()));
      const int out = ::open((folder_ / "log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      ::dup2(out, 1), ::dup2(out, 2);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    for (int i = 0; i < 1200 && port_ == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const std::string text = log();
      if (const size_t at = text.find("serving on http://"); at != text.npos && text.find(',', at) != text.npos)
        port_ = std::stoi(text.substr(text.find(':', at + 18) + 1));
      if (::waitpid(process_, &status_, WNOHANG) == process_) {
        process_ = -1;
        break;
      }
    }
    EXPECT_NE(port_, 0) << log();
  }
  ~TestServer() {
    if (process_ <= 0) return;
    EXPECT_TRUE(runs()) << "the server has ended: " << log();
    if (process_ > 0) ::kill(process_, SIGKILL), ::waitpid(process_, &status_, 0);
  }
  int port() const { return port_; }
  std::string log() const { return exists(folder_ / "log") ? read_file(folder_ / "log") : ""; }
  bool runs() {
    if (process_ > 0 && ::waitpid(process_, &status_, WNOHANG) == process_) process_ = -1;
    return process_ > 0;
  }
  /// Resident memory of the process in MB.
  double resident_mb() const {
    std::ifstream file(fmt::format("/proc/{}/status", process_));
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    return std::stod(text.substr(text.find("VmRSS:") + 6)) / 1024;
  }
  void signal(int number) const {
    ::kill(process_, number);
    const Client wakes(port_);  // under the thread sanitizer a signal is handled when accept() returns
  }
  /// The exit status, or 128 plus the number of the signal that killed it.
  int wait() {
    while (process_ > 0 && ::waitpid(process_, &status_, WNOHANG) == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    process_ = -1;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }

  std::string request(const std::string& method, const std::string& path, const std::string& body = "",
                      Headers headers = {}) const {
    if (std::ranges::none_of(headers, [](const std::string& h) { return h.starts_with("Host:"); }))
      headers.push_back(fmt::format("Host: 127.0.0.1:{}", port_));
    if (!body.empty()) headers.push_back(fmt::format("Content-Length: {}", body.size()));
    std::string text = method + " " + path + " HTTP/1.1\r\n";
    for (const std::string& h : headers) text += h + "\r\n";
    return text + "\r\n" + body;
  }
  Answer send(const std::string& bytes) const {
    const Client client(port_);
    client.send(bytes);
    return answer_of(client.rest());
  }
  Answer get(const std::string& path, const Headers& headers = {}) const {
    return send(request("GET", path, "", headers));
  }
  Answer post(const std::string& path, const json& body, Headers headers = {}) const {
    headers.emplace_back("Content-Type: application/json");
    return send(request("POST", path, body.dump(), headers));
  }
  /// Sends a form. `fields`: texts by name; `files`: file contents by name.
  Answer post_form(const std::string& path, const std::vector<std::pair<std::string, std::string>>& fields,
                   const std::vector<std::pair<std::string, std::string>>& files) const {
    const std::string boundary = "----boundary1234";
    std::string body;
    for (const auto& [name, value] : fields)
      body += fmt::format("--{}\r\nContent-Disposition: form-data; name=\"{}\"\r\n\r\n{}\r\n", boundary, name, value);
    for (const auto& [name, bytes] : files)
      body += fmt::format(
          "--{}\r\nContent-Disposition: form-data; name=\"{}\"; filename=\"a.png\"\r\nContent-Type: "
          "image/png\r\n\r\n{}\r\n",
          boundary, name, bytes);
    body += "--" + boundary + "--\r\n";
    return send(request("POST", path, body, {"Content-Type: multipart/form-data; boundary=" + boundary}));
  }

 private:
  TemporaryFolder folder_;
  pid_t process_ = -1;
  int port_ = 0, status_ = 0;
};

}  // namespace md
