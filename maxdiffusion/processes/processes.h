// Communication of the processes of one run. A CPU client belongs to one process, so sums over processes go through
// this interface. GPU clients span all processes and use it as their key-value store. A single process has rank 0 of 1,
// and every call returns at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"

namespace md {

/// Thread safe.
class Processes {
 public:
  virtual ~Processes() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t count() const = 0;
  bool alone() const { return count() == 1; }
  /// Process 0, which writes the run's files and log.
  bool is_coordinator() const { return rank() == 0; }

  /// All-gather of texts, by rank; returns when all processes have called it with this topic. The n-th calls of a topic
  /// match. Throws device if a process is lost.
  virtual std::vector<std::string> gather(const std::string& topic, const std::string& mine) = 0;
  /// Gathers all texts at process 0; the others receive only the text of process 0.
  virtual std::vector<std::string> gather_at_coordinator(const std::string& topic, const std::string& mine) = 0;
  void barrier(const std::string& topic) { gather(topic, ""); }
  /// Broadcasts the text of process 0.
  std::string from_coordinator(const std::string& topic, const std::string& mine) {
    return gather(topic, mine).front();
  }
  /// The maximum over all processes.
  int64_t largest(const std::string& topic, int64_t mine);
  /// Calls `act` in process 0, then in the others, which read the files that it wrote.
  template <class F>
  void coordinator_first(const std::string& topic, F&& act) {
    if (!is_coordinator()) barrier(topic);
    act();
    if (is_coordinator()) barrier(topic);
  }

  /// Key-value store of all processes. A key is set once.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// None if it is not set yet. Throws device if a process is lost.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  /// Broadcasts the bytes of process 0. Collective. Throws device.
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// Prepares sums of this number of devices. Collective.
  virtual void open_sums(int64_t devices) = 0;
  /// Replaces the arrays by their sums over all processes, added in the order of ranks, times `scale`: bit-identical in
  /// all processes. Returns when all have called it for device `device`. Throws device.
  virtual void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) = 0;
};

/// The processes of this run. A global, because a process belongs to one job from start to end.
Processes& processes();

/// Local rank of this process on its host, and number of processes there. Collective.
struct LocalRank {
  int64_t rank = 0, count = 1;
};
LocalRank local_rank(Processes& all);

/// Why the library that joins several processes by MPI cannot be opened; empty if it can. Opens it.
std::string mpi_problem();

/// Connects to the processes of an MPI launcher or, with `on_tpus` and no launcher, of the other hosts of a slice
/// (tpu_workers.h), without sum() and broadcast(). No effect for a single process. Afterwards: a lost process ends this
/// one with a message that names it and the exit status of Code::device; processes other than 0 log only warnings and
/// errors, with their rank as prefix; interrupt_signal() returns the signal of set_shared_interrupt()
/// (base/interrupt.h). Throws invalid_config or device.
void join_processes(bool on_tpus = false);
/// Disconnects. `well`: waits for all processes; otherwise reports to the others that this process failed.
void leave_processes(bool well);
/// Throws in every process what one of them found: its own error, else that of the lowest rank that has one, with its
/// code. Collective. Every process then ends with this error's exit status. `topic` as in Processes::gather.
void throw_together(Processes& all, const std::string& topic, const std::optional<Error>& mine);

}  // namespace md
