// The connections of a job's processes: one by TCP between each and process 0, over which they meet, tell each other
// texts, and show that they are alive. Liveness needs nothing of the launcher: a process that is stopped or cut off is
// found as one that is killed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace md {

/// As the kernel knows it; "?" where it does not.
std::string host_name();

struct RendezvousOptions {
  int64_t rank = 0, count = 1;
  int port = 0;        // where process 0 listens; 0: anywhere
  std::string secret;  // the same in all of the job's processes, so that no stranger joins
  /// Every process says that it lives once in `beat`; one of which nothing was heard for `limit` is lost.
  std::chrono::milliseconds beat{500}, limit{6000};
  std::chrono::milliseconds joining{60000};  // how long they wait for each other at the start
  std::chrono::milliseconds own_end{1000};   // how long after another has failed this one may end by itself
  /// Called once, on a thread of the rendezvous, where a process is lost or has failed: with its name and what
  /// happened.
  std::function<void(const std::string& why)> lost;
};

/// Thread safe.
class Rendezvous {
 public:
  explicit Rendezvous(RendezvousOptions options);
  /// As leave(false) where it was not called.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  /// Process 0: where the others find it.
  std::string address() const;
  /// The same for others, of a process 0 with a `port` on a host of this name. Throws device where nobody knows it.
  static std::string address_of(const std::string& host, int port);
  /// Connects with process 0, which waits for all others. Throws device where one does not come in time.
  void join(const std::string& address);
  /// What every process gives, by rank; returns when all have called it with this topic. The calls of a topic belong to
  /// each other in their order, and each process makes them one after the other. Throws device where a process is lost.
  /// `coordinator_only`: what the others have given is told to process 0 alone, and to them what process 0 has; a topic
  /// is always called in one of these ways. Large texts may go one way at a time.
  std::vector<std::string> gather(const std::string& topic, const std::string& mine, bool coordinator_only = false);
  /// Texts by key, which process 0 holds; a key is put once. get: nothing where nobody has put it yet. Throw device
  /// where a process is lost.
  void put(const std::string& key, const std::string& value);
  std::optional<std::string> get(const std::string& key);
  /// Closes the connections. `well`: the others go on without this process; else they are told that it has failed.
  void leave(bool well);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
