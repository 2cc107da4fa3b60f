#include "maxdiffusion/processes/tpu_workers.h"

#include <fmt/format.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(separator, at), text.size());
    out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

int64_t number(const std::string& name, const std::string& text, int64_t below) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  check(error == std::errc() && end == text.data() + text.size() && value >= 0 && value < below, Code::invalid_config,
        "{} is '{}'; expected a number below {}", name, text, below);
  return value;
}

/// The value of a line "NAME: 'value'".
std::optional<std::string> line_value(const std::string& lines, const std::string& name) {
  for (const std::string& line : parts_of(lines, '\n')) {
    if (!line.starts_with(name + ":")) continue;
    const size_t first = line.find_first_not_of(" '", name.size() + 1), last = line.find_last_not_of(" '\r");
    return first == line.npos ? "" : line.substr(first, last - first + 1);
  }
  return {};
}

}  // namespace

Launch tpu_worker_of(const std::function<const char*(const char*)>& variable,
                     const std::function<std::optional<std::string>(const std::string&)>& metadata) {
  constexpr int64_t kMost = 1 << 20;
  Launch launch;
  std::vector<std::string> hosts;
  std::optional<std::string> id, environment;
  const char* listed = variable("TPU_WORKER_HOSTNAMES");
  if (const char* worker_id = variable("TPU_WORKER_ID"); worker_id != nullptr && listed != nullptr) {
    launch.by = "TPU_WORKER_ID";
    id = worker_id;
    hosts = parts_of(listed, ',');
  } else {
    launch.by = "agent-worker-number";
    id = metadata(launch.by);
    const std::optional<std::string> endpoints = id ? metadata("worker-network-endpoints") : std::nullopt;
    if (!endpoints) return {};
    for (const std::string& endpoint : parts_of(*endpoints, ',')) {
      const std::vector<std::string> words = parts_of(endpoint, ':');
      check(words.size() >= 3, Code::invalid_config,
            "worker-network-endpoints has '{}'; expected three words between colons", endpoint);
      hosts.push_back(words[2]);
    }
    environment = metadata("tpu-env");
  }
  const auto of_slices = [&](const char* name) -> std::optional<std::string> {
    if (const char* text = variable(name); text != nullptr) return text;
    return environment ? line_value(*environment, name) : std::nullopt;
  };
  launch.count = std::ssize(hosts);
  launch.rank = number(launch.by, *id, launch.count);
  launch.coordinator = hosts.front();
  if (const auto slices = of_slices("MEGASCALE_NUM_SLICES"), coordinator = of_slices("MEGASCALE_COORDINATOR_ADDRESS");
      slices && coordinator) {
    const int64_t all = number("MEGASCALE_NUM_SLICES", *slices, kMost);
    launch.rank += launch.count * number("MEGASCALE_SLICE_ID", of_slices("MEGASCALE_SLICE_ID").value_or(""), all);
    launch.count *= all;
    launch.coordinator = parts_of(*coordinator, ':').front();
  }
  return launch;
}

Launch tpu_worker_of_machine() {
  const char* host = std::getenv("GCE_METADATA_HOST");
  return tpu_worker_of([](const char* name) { return std::getenv(name); },
                       [at = std::string(host != nullptr ? host : "metadata.google.internal")](
                           const std::string& attribute) { return google_metadata(at, attribute); });
}

std::optional<std::string> google_metadata(const std::string& host, const std::string& attribute) {
  const std::vector<std::string> words = parts_of(host, ':');
  const std::string port = words.size() > 1 ? words[1] : "80";
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(words[0].c_str(), port.c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  const std::unique_ptr<const int, void (*)(const int*)> connection(
      new int(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), [](const int* fd) {
        if (*fd >= 0) ::close(*fd);
        delete fd;
      });
  const timeval second{1, 0};
  ::setsockopt(*connection, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);  // also the timeout of connect()
  ::setsockopt(*connection, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
  if (::connect(*connection, found->ai_addr, found->ai_addrlen) != 0) return {};
  const std::string request = fmt::format(
      "GET /computeMetadata/v1/instance/attributes/{} HTTP/1.0\r\nHost: {}\r\nMetadata-Flavor: Google\r\n\r\n",
      attribute, words[0]);
  if (::send(*connection, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size()))
    return {};
  std::string response;
  std::array<char, 4096> part;
  ssize_t n = 0;
  while (response.size() < (1 << 20) && (n = ::recv(*connection, part.data(), part.size(), 0)) > 0)
    response.append(part.data(), static_cast<size_t>(n));
  const size_t body = response.find("\r\n\r\n");
  if (n != 0 || !response.starts_with("HTTP/1.") || response.substr(8, 5) != " 200 " || body == response.npos)
    return {};
  return response.substr(body + 4);
}

}  // namespace md
