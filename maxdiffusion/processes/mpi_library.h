// What md_mpi.so does: sums between processes by MPI. The program opens it only where a launcher has started several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

namespace md {

class MpiLibrary {
 public:
  virtual ~MpiLibrary() = default;
  /// MPI_Init_thread for calls from any thread. Throws device.
  virtual void start() = 0;
  virtual int64_t rank() const = 0;
  virtual int64_t count() const = 0;
  /// The text of process 0, in all processes.
  virtual std::string from_first(const std::string& text) = 0;
  /// Replaces bytes by those of process 0. Throws device with MPI's words.
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// A communicator for each of so many devices. Called by all processes, at the same place.
  virtual void open(int64_t devices) = 0;
  /// Replaces the arrays by their sums over the processes in the order of their ranks, times `scale`. Sums of different
  /// devices may be under way at once. Throws device with MPI's words.
  virtual void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) = 0;
  /// MPI_Finalize, by all processes.
  virtual void finish() = 0;
};

}  // namespace md
