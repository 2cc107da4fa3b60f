#include "maxdiffusion/processes/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "maxdiffusion/base/error.h"

namespace md {

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A message is its length, its kind, and a text.
enum class Kind : char {
  hello = 'h',
  beat = 'b',
  gather = 'g',
  all = 'a',
  put = 'p',
  get = 'q',
  value = 'v',  // a reply: number of the request, and the value, if any
  lost = 'l',
  failed = 'f',
  bye = 'e'
};
struct Message {
  Kind kind;
  std::string text;
};

std::string framed(Kind kind, const std::string& text) {
  const auto size = static_cast<uint32_t>(text.size() + 1);
  std::string out(sizeof size, '\0');
  std::memcpy(out.data(), &size, sizeof size);
  return out + static_cast<char>(kind) + text;
}

/// Removes the first complete message from the received bytes.
std::optional<Message> take(std::string& buffer) {
  uint32_t size = 0;
  if (buffer.size() < sizeof size) return {};
  std::memcpy(&size, buffer.data(), sizeof size);
  if (size == 0 || buffer.size() < sizeof size + size) return {};
  Message m{static_cast<Kind>(buffer[sizeof size]), buffer.substr(sizeof size + 1, size - 1)};
  buffer.erase(0, sizeof size + size);
  return m;
}

/// Concatenates texts, each preceded by its length.
std::string joined(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& p : parts) out += fmt::format("{}:", p.size()) + p;
  return out;
}
std::vector<std::string> parted(const std::string& text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t colon = text.find(':', at);
    check(colon != text.npos, Code::device, "processes: received a message of another program");
    const size_t size = std::strtoull(text.c_str() + at, nullptr, 10);
    out.push_back(text.substr(colon + 1, size));
    at = colon + 1 + size;
  }
  return out;
}

std::string this_place() { return fmt::format("{}, pid {}", host_name(), ::getpid()); }

std::vector<std::string> local_addresses() {
  std::vector<std::string> out;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return out;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* a = reinterpret_cast<const sockaddr_in*>(i->ifa_addr);
    if (::inet_ntop(AF_INET, &a->sin_addr, text.data(), text.size()) != nullptr &&
        !std::string_view(text.data()).starts_with("127."))
      out.emplace_back(text.data());
  }
  ::freeifaddrs(all);
  return out;
}

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

  /// Sends a complete message, or returns false and closes the connection, because the peer could not parse anything
  /// after a partial message. A peer that does not read blocks this only for a limited time.
  bool send(const std::string& bytes) const {
    for (size_t at = 0; at < bytes.size();) {
      const ssize_t n = ::send(fd_, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0 && at > 0) ::shutdown(fd_, SHUT_RDWR);
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }
  /// Appends available bytes, waiting for at least one; false if the connection has ended.
  bool receive(std::string& to) const {
    std::array<char, 1 << 16> part;
    ssize_t n = 0;
    do {
      n = ::recv(fd_, part.data(), part.size(), 0);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return false;
    to.append(part.data(), static_cast<size_t>(n));
    return true;
  }

 private:
  int fd_;
};

Socket new_socket() {
  Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  check(static_cast<bool>(s), Code::device, "processes: no socket: {}", std::strerror(errno));
  const int on = 1;
  const timeval limit{2, 0};
  ::setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(s.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return s;
}

/// None if no process listens at that address.
Socket connected(const std::string& ip, int port) {
  Socket s = new_socket();
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  if (::inet_pton(AF_INET, ip.c_str(), &to.sin_addr) != 1) return Socket();
  const int flags = ::fcntl(s.fd(), F_GETFL);
  ::fcntl(s.fd(), F_SETFL, flags | O_NONBLOCK);
  if (::connect(s.fd(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    pollfd wait{s.fd(), POLLOUT, 0};
    int error = 0;
    socklen_t size = sizeof error;
    if (errno != EINPROGRESS || ::poll(&wait, 1, 3000) != 1 ||
        ::getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0)
      return Socket();
  }
  ::fcntl(s.fd(), F_SETFL, flags);
  return s;
}

struct Peer {
  Socket socket;
  std::string place, read;  // host and pid; received bytes of an incomplete message
  Clock::time_point heard = Clock::now();
  bool left = false;
};

}  // namespace

struct Rendezvous::Impl {
  RendezvousOptions o;
  Socket listener;
  std::map<int64_t, Peer> peers;  // by rank; in process 0 all others, in the others process 0
  // Names of failed processes, used by the thread only. Often all fail for the same reason, such as a rejected config;
  // then each of them reports it first.
  std::string failed;
  Clock::time_point failed_at;
  std::array<int, 2> wake{-1, -1};
  std::thread thread;

  std::mutex mutex;  // guards the members below, and sending
  std::condition_variable changed;
  std::string lost;  // why the job ends; empty: it continues
  bool ending = false;
  std::map<std::string, std::map<int64_t, std::deque<std::string>>> contributions;  // process 0: topic, rank
  std::map<std::string, std::deque<std::vector<std::string>>> gathered;             // by topic
  std::set<std::string> to_coordinator;                                             // process 0: topics
  std::map<std::string, std::string> values;                                        // process 0: by key
  std::map<std::string, std::vector<std::string>> replies;                          // by request number
  int64_t questions = 0;

  std::string name(int64_t rank) const { return fmt::format("process {} ({})", rank, peers.at(rank).place); }
  void accept_all();
  void connect_to(const std::string& address);
  void serve();
  void read_from(int64_t rank, Peer& peer);
  void handle(int64_t rank, Peer& peer, const Message& m);
  void complete(const std::string& topic);
  void give_up(const std::string& why, int64_t because);
};

Rendezvous::Rendezvous(RendezvousOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->o = std::move(options);
  if (impl_->o.rank != 0) return;
  impl_->listener = new_socket();
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(static_cast<uint16_t>(impl_->o.port));
  const int on = 1;
  ::setsockopt(impl_->listener.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  check(::bind(impl_->listener.fd(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0 &&
            ::listen(impl_->listener.fd(), 1024) == 0,
        Code::device, "processes: process 0 cannot listen{}: {}",
        impl_->o.port > 0 ? fmt::format(" at port {}", impl_->o.port) : "", std::strerror(errno));
}

Rendezvous::~Rendezvous() { leave(false); }

std::string Rendezvous::address() const {
  sockaddr_in at{};
  socklen_t size = sizeof at;
  ::getsockname(impl_->listener.fd(), reinterpret_cast<sockaddr*>(&at), &size);
  std::string text = fmt::format("{} {}", host_name(), ntohs(at.sin_port));
  for (const std::string& a : local_addresses()) text += " " + a;
  return text;
}

std::string Rendezvous::address_of(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  check(error == 0, Code::device, "processes: no address of process 0's host '{}': {}", host, ::gai_strerror(error));
  std::string text = fmt::format("{} {}", host, port);
  for (const addrinfo* i = found; i != nullptr; i = i->ai_next) {
    std::array<char, INET_ADDRSTRLEN> ip{};
    const auto* a = reinterpret_cast<const sockaddr_in*>(i->ai_addr);
    if (::inet_ntop(AF_INET, &a->sin_addr, ip.data(), ip.size()) != nullptr) text += fmt::format(" {}", ip.data());
  }
  ::freeaddrinfo(found);
  return text;
}

void Rendezvous::join(const std::string& address) {
  if (impl_->o.rank == 0)
    impl_->accept_all();
  else
    impl_->connect_to(address);
  check(::pipe2(impl_->wake.data(), O_CLOEXEC) == 0, Code::device, "processes: no pipe: {}", std::strerror(errno));
  impl_->thread = std::thread([this] { impl_->serve(); });
}

void Rendezvous::Impl::accept_all() {
  const auto end = Clock::now() + o.joining;
  while (static_cast<int64_t>(peers.size()) < o.count - 1) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now()).count();
    pollfd wait{listener.fd(), POLLIN, 0};
    check(left > 0 && ::poll(&wait, 1, static_cast<int>(left)) >= 0, Code::device,
          "processes: {} of {} connected to process 0 within {} seconds", peers.size() + 1, o.count,
          o.joining.count() / 1000);
    if (wait.revents == 0) continue;
    Socket s(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!s) continue;
    const int on = 1;
    timeval limit{2, 0};
    ::setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    ::setsockopt(s.fd(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    ::setsockopt(s.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    Peer peer;
    std::optional<Message> hello;
    while (!hello && peer.read.size() < 4096 && s.receive(peer.read)) hello = take(peer.read);
    if (!hello || hello->kind != Kind::hello) continue;
    const std::vector<std::string> words = parted(hello->text);
    if (words.size() != 3 || words[0] != o.secret) continue;
    limit.tv_sec = 0;
    ::setsockopt(s.fd(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    peer.socket = std::move(s);
    peer.place = words[2];
    peers.insert_or_assign(std::stoll(words[1]), std::move(peer));
  }
  for (auto& [rank, peer] : peers) {
    peer.heard = Clock::now();
    check(peer.socket.send(framed(Kind::hello, joined({o.secret, "0", this_place()}))), Code::device,
          "processes: {} is gone", name(rank));
  }
}

void Rendezvous::Impl::connect_to(const std::string& address) {
  std::istringstream words(address);
  std::string host, ip;
  int port = 0;
  words >> host >> port;
  std::vector<std::string> ips;
  if (host == host_name()) ips.emplace_back("127.0.0.1");
  while (words >> ip) ips.push_back(ip);
  const auto end = Clock::now() + o.joining;
  Peer& coordinator = peers[0];
  while (!coordinator.socket) {
    for (const std::string& at : ips)
      if (coordinator.socket = connected(at, port); coordinator.socket) break;
    check(Clock::now() < end, Code::device,
          "processes: process {} could not connect to process 0 at {} within {} seconds", o.rank, address,
          o.joining.count() / 1000);
    if (!coordinator.socket) std::this_thread::sleep_for(milliseconds(100));
  }
  coordinator.place = host;
  std::optional<Message> reply;
  if (coordinator.socket.send(framed(Kind::hello, joined({o.secret, std::to_string(o.rank), this_place()}))))
    while (!reply && coordinator.socket.receive(coordinator.read)) reply = take(coordinator.read);
  const std::vector<std::string> fields = reply ? parted(reply->text) : std::vector<std::string>();
  check(fields.size() == 3 && fields[0] == o.secret, Code::device, "processes: {} did not wait for process {}", name(0),
        o.rank);
  coordinator.place = fields[2];
  coordinator.heard = Clock::now();
}

/// Reads messages, sends heartbeats, and checks those of the other processes.
void Rendezvous::Impl::serve() {
  auto last = Clock::now(), next_beat = last;
  while (true) {
    std::vector<pollfd> fds = {{wake[0], POLLIN, 0}};
    std::vector<int64_t> ranks;
    for (auto& [rank, peer] : peers)
      if (peer.socket) fds.push_back({peer.socket.fd(), POLLIN, 0}), ranks.push_back(rank);
    ::poll(fds.data(), fds.size(), static_cast<int>(o.beat.count() / 2));
    for (size_t i = 0; i < ranks.size(); ++i)
      if (fds[i + 1].revents != 0) read_from(ranks[i], peers.at(ranks[i]));
    const auto now = Clock::now();
    // After a suspension this process has received no heartbeats, but the others may be alive.
    if (const auto gap = now - last; gap > 4 * o.beat)
      for (auto& [rank, peer] : peers) peer.heard += gap;
    last = now;
    {
      std::lock_guard lock(mutex);
      if (ending || !lost.empty()) return;
      if (now >= next_beat) {
        next_beat = now + o.beat;
        for (auto& [rank, peer] : peers)
          if (peer.socket) peer.socket.send(framed(Kind::beat, ""));
      }
    }
    if (!failed.empty() && now - failed_at > o.exit_grace) return give_up(failed, o.rank);
    for (auto& [rank, peer] : peers)
      if (peer.socket && now - peer.heard > o.limit)
        return give_up(fmt::format("{} is lost: nothing was heard of it for {:.1f} seconds", name(rank),
                                   std::chrono::duration<double>(now - peer.heard).count()),
                       rank);
  }
}

void Rendezvous::Impl::read_from(int64_t rank, Peer& peer) {
  const bool open = peer.socket.receive(peer.read);
  while (std::optional<Message> m = take(peer.read)) handle(rank, peer, *m);
  peer.heard = Clock::now();
  if (open) return;
  bool expected = false;
  {
    std::lock_guard lock(mutex);
    peer.socket = Socket();
    expected = peer.left || ending || !lost.empty();
  }
  if (!expected) give_up(fmt::format("{} is lost: its connection has ended", name(rank)), rank);
}

void Rendezvous::Impl::handle(int64_t rank, Peer& peer, const Message& m) {
  switch (m.kind) {
    case Kind::gather: {
      std::vector<std::string> parts = parted(m.text);
      std::lock_guard lock(mutex);
      contributions[parts.at(0)][rank].push_back(std::move(parts.at(1)));
      complete(parts[0]);
      break;
    }
    case Kind::all: {
      std::vector<std::string> parts = parted(m.text);
      const std::string topic = parts.at(0);
      parts.erase(parts.begin());
      std::lock_guard lock(mutex);
      gathered[topic].push_back(std::move(parts));
      changed.notify_all();
      break;
    }
    case Kind::put: {
      std::vector<std::string> parts = parted(m.text);
      std::lock_guard lock(mutex);
      values[parts.at(0)] = std::move(parts.at(1));
      break;
    }
    case Kind::get: {
      const std::vector<std::string> parts = parted(m.text);
      std::lock_guard lock(mutex);
      std::vector<std::string> reply = {parts.at(0)};
      if (const auto found = values.find(parts.at(1)); found != values.end()) reply.push_back(found->second);
      if (peer.socket) peer.socket.send(framed(Kind::value, joined(reply)));
      break;
    }
    case Kind::value: {
      std::vector<std::string> parts = parted(m.text);
      std::lock_guard lock(mutex);
      replies[parts.at(0)] = {parts.begin() + 1, parts.end()};
      changed.notify_all();
      break;
    }
    case Kind::lost: give_up(m.text, rank); break;
    case Kind::failed:
      peer.left = true;
      if (failed.empty()) failed = name(rank) + " failed; its messages are above", failed_at = Clock::now();
      break;
    case Kind::bye: peer.left = true; break;
    case Kind::hello:
    case Kind::beat: break;
  }
}

/// In process 0, holding the mutex: replies once all processes have contributed.
void Rendezvous::Impl::complete(const std::string& topic) {
  auto& of_rank = contributions[topic];
  if (static_cast<int64_t>(of_rank.size()) < o.count ||
      std::ranges::any_of(of_rank, [](const auto& r) { return r.second.empty(); }))
    return;
  std::vector<std::string> all = {topic};
  for (auto& [rank, queue] : of_rank) {
    all.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  const std::string reply = framed(Kind::all, to_coordinator.contains(topic) ? joined({all[0], all[1]}) : joined(all));
  for (auto& [rank, peer] : peers)
    if (peer.socket) peer.socket.send(reply);  // if this fails, reading fails as well
  all.erase(all.begin());
  gathered[topic].push_back(std::move(all));
  changed.notify_all();
}

/// Ends the job: notifies the other processes and waiting threads.
void Rendezvous::Impl::give_up(const std::string& why, int64_t because) {
  {
    std::lock_guard lock(mutex);
    if (!lost.empty() || ending) return;
    lost = why;
    if (o.rank == 0)
      for (auto& [rank, peer] : peers)
        if (rank != because && peer.socket) peer.socket.send(framed(Kind::lost, why));
    changed.notify_all();
  }
  if (o.lost) o.lost(why);
}

std::vector<std::string> Rendezvous::gather(const std::string& topic, const std::string& mine, bool coordinator_only) {
  Impl& h = *impl_;
  std::unique_lock lock(h.mutex);
  if (h.o.rank == 0) {
    if (coordinator_only) h.to_coordinator.insert(topic);
    h.contributions[topic][0].push_back(mine);
    h.complete(topic);
  } else if (h.peers.at(0).socket) {
    h.peers.at(0).socket.send(framed(Kind::gather, joined({topic, mine})));
  }
  h.changed.wait(lock, [&] { return !h.lost.empty() || !h.gathered[topic].empty(); });
  auto& results = h.gathered[topic];
  check(!results.empty(), Code::device, "{}", h.lost);
  std::vector<std::string> all = std::move(results.front());
  results.pop_front();
  return all;
}

void Rendezvous::put(const std::string& key, const std::string& value) {
  Impl& h = *impl_;
  std::lock_guard lock(h.mutex);
  check(h.lost.empty(), Code::device, "{}", h.lost);
  if (h.o.rank == 0) {
    h.values[key] = value;
  } else if (h.peers.at(0).socket) {
    h.peers.at(0).socket.send(framed(Kind::put, joined({key, value})));
  }
}

std::optional<std::string> Rendezvous::get(const std::string& key) {
  Impl& h = *impl_;
  std::unique_lock lock(h.mutex);
  if (h.o.rank == 0) {
    check(h.lost.empty(), Code::device, "{}", h.lost);
    const auto found = h.values.find(key);
    return found == h.values.end() ? std::nullopt : std::optional(found->second);
  }
  const std::string question = std::to_string(h.questions++);
  if (h.peers.at(0).socket) h.peers.at(0).socket.send(framed(Kind::get, joined({question, key})));
  h.changed.wait(lock, [&] { return !h.lost.empty() || h.replies.contains(question); });
  const auto reply = h.replies.extract(question);
  check(!reply.empty(), Code::device, "{}", h.lost);
  return reply.mapped().empty() ? std::nullopt : std::optional(reply.mapped()[0]);
}

void Rendezvous::leave(bool well) {
  Impl& h = *impl_;
  {
    std::lock_guard lock(h.mutex);
    if (std::exchange(h.ending, true)) return;
    for (auto& [rank, peer] : h.peers)
      if (peer.socket) peer.socket.send(framed(well ? Kind::bye : Kind::failed, ""));
  }
  if (!h.thread.joinable()) return;
  const char byte = 0;
  [[maybe_unused]] const auto n = ::write(h.wake[1], &byte, 1);
  h.thread.join();
  for (int fd : h.wake) ::close(fd);
  h.peers.clear();
}

}  // namespace md
