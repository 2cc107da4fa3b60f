// Connections of a job's processes: one TCP connection between each process and process 0, for rendezvous, texts and
// heartbeats. Liveness does not depend on the launcher: a stopped or disconnected process is detected like a killed
// one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace md {

/// The host name; "?" if unknown.
std::string host_name();

struct RendezvousOptions {
  int64_t rank = 0, count = 1;
  int port = 0;        // port of process 0; 0: any free port
  std::string secret;  // shared by the job's processes; other connections are refused
  /// Interval of heartbeats; a process without one for `limit` is lost.
  std::chrono::milliseconds beat{500}, limit{6000};
  std::chrono::milliseconds joining{60000};    // timeout of the rendezvous
  std::chrono::milliseconds exit_grace{1000};  // time in which this process may exit on its own after another failed
  /// Called once, on a thread of the rendezvous, if a process is lost or failed: with its name and the reason.
  std::function<void(const std::string& why)> lost;
};

/// Thread safe.
class Rendezvous {
 public:
  explicit Rendezvous(RendezvousOptions options);
  /// Calls leave(false) unless leave() was called.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  /// Address of process 0; called in process 0.
  std::string address() const;
  /// Address of a process 0 with a fixed `port` on this host. Throws device if the host is unknown.
  static std::string address_of(const std::string& host, int port);
  /// Connects to process 0, which waits for all others. Throws device on timeout.
  void join(const std::string& address);
  /// All-gather of texts, by rank; returns when all processes have called it with this topic. The n-th calls of a topic
  /// match; each process makes them in sequence. Throws device if a process is lost. `coordinator_only`: process 0
  /// receives all texts, the others only that of process 0; all calls of a topic must agree on it. Large texts may go
  /// in one direction at a time.
  std::vector<std::string> gather(const std::string& topic, const std::string& mine, bool coordinator_only = false);
  /// Key-value store in process 0; a key is set once. get: none if it is not set yet. Throw device if a process is
  /// lost.
  void put(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key);
  /// Closes the connections. `well`: the others continue; otherwise they are notified that this process failed.
  void leave(bool well);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
