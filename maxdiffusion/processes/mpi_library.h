// Interface of md_mpi.so: sums over processes by MPI. Opened only if a launcher started several processes.
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
  /// Broadcasts the text of process 0.
  virtual std::string from_first(const std::string& text) = 0;
  /// Broadcasts the bytes of process 0. Throws device with MPI's message.
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// Creates one communicator per device. Collective.
  virtual void open(int64_t devices) = 0;
  /// Replaces the arrays by their sums over the processes in the order of their ranks, times `scale`. Sums of different
  /// devices may run concurrently. Throws device with MPI's message.
  virtual void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) = 0;
  /// MPI_Finalize. Collective.
  virtual void finish() = 0;
};

}  // namespace md
