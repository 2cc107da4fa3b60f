// The processes that were started to train together, as each of them sees it. CPU clients are of one
// process, so each process of such a job has devices of its own, which do not know those of the others: what crosses
// goes through here. Clients of GPUs are of all processes, and find each other through here. Alone, a process has rank
// 0 of 1, and every call returns at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace md {

/// Thread safe.
class Processes {
 public:
  virtual ~Processes() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t count() const = 0;
  bool alone() const { return count() == 1; }
  /// The one that writes the run's files and its log.
  bool is_coordinator() const { return rank() == 0; }

  /// What every process gives, by rank; returns when all have called it with this topic. The calls of a topic belong to
  /// each other in their order. Throws device where a process is lost.
  virtual std::vector<std::string> gather(const std::string& topic, const std::string& mine) = 0;
  /// The same, of which the others hear what the coordinator gives alone.
  virtual std::vector<std::string> gather_at_coordinator(const std::string& topic, const std::string& mine) = 0;
  void barrier(const std::string& topic) { gather(topic, ""); }
  /// The coordinator's text.
  std::string from_coordinator(const std::string& topic, const std::string& mine) {
    return gather(topic, mine).front();
  }
  /// The largest of all.
  int64_t largest(const std::string& topic, int64_t mine);
  /// Calls `act` in the coordinator, then in the others, which find in files what it has left there.
  template <class F>
  void coordinator_first(const std::string& topic, F&& act) {
    if (!is_coordinator()) barrier(topic);
    act();
    if (is_coordinator()) barrier(topic);
  }

  /// Texts by key that all processes see. A key is put once.
  virtual void put(const std::string& key, const std::string& value) = 0;
  /// Nothing: no process has put it yet. Throws device where a process is lost.
  virtual std::optional<std::string> get(const std::string& key) = 0;

  /// Replaces bytes by those of the coordinator. All processes make these calls in one order. Throws device.
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// Makes ready for sums of so many devices. Called by all processes, at the same place.
  virtual void open_sums(int64_t devices) = 0;
  /// Replaces the arrays by their sums over all processes, added in the order of ranks, times `scale`: the same bits
  /// everywhere. Returns when all have called it for device `device`. Throws device.
  virtual void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) = 0;
};

/// Those of this process. It is of one job or of none from its start to its end, whatever it runs: the one value that
/// is not handed down.
Processes& processes();

/// This process's number among those of its host, and how many these are. Called by all processes.
struct LocalRank {
  int64_t rank = 0, count = 1;
};
LocalRank local_rank(Processes& all);

/// Why the library that joins several processes by MPI cannot be opened; empty: it can. It is opened.
std::string mpi_problem();

/// Joins the processes that an MPI launcher has started with this one or, with `on_tpus` and no launcher, those of the
/// other hosts of a slice (tpu_workers.h), where sum() and broadcast() are refused; alone, nothing. From then on a
/// process that is lost ends this one with a message that names it and the exit status of Code::device, wherever it is;
/// the log of all but the coordinator has only warnings and errors, with the rank in front; and a signal is told by
/// interrupt_signal() when set_shared_interrupt() has been called (base/interrupt.h). Throws invalid_config or device.
void join_processes(bool on_tpus = false);
/// Ends what join_processes() began. `well`: waits until all have come here; else the others are told that this process
/// has failed.
void leave_processes(bool well);

}  // namespace md
