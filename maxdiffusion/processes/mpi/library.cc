// Sums with MPI: each process adds one part of the elements, in rank order, and sends the sums to all, so that every
// process has the same bits.
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/processes/mpi_library.h"

namespace md {
namespace {

void succeed(int result, const char* what) {
  if (result == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(result, text.data(), &length);
  fail(Code::device, "{}: {}", what, std::string(text.data(), static_cast<size_t>(length)));
}

/// Waits without spinning, because the library's own wait occupies a core.
void wait(MPI_Request& request, const char* what) {
  using namespace std::chrono_literals;
  auto pause = 5us;
  for (int done = 0; true; pause = std::min(pause * 3 / 2 + 1us, 500us)) {
    succeed(MPI_Test(&request, &done, MPI_STATUS_IGNORE), what);
    if (done != 0) return;
    std::this_thread::sleep_for(pause);
  }
}

/// The elements of consecutive arrays as if they were one array.
class Joined {
 public:
  explicit Joined(std::span<const std::span<float>> arrays) : arrays_(arrays) {}
  /// Calls act(memory, elements) for each range of the next n elements.
  template <class F>
  void next(int64_t n, F&& act) {
    while (n > 0) {
      const std::span<float> a = arrays_[array_];
      const int64_t part = std::min(n, static_cast<int64_t>(a.size()) - at_);
      if (part > 0) act(a.data() + at_, part);
      n -= part, at_ += part;
      if (at_ == static_cast<int64_t>(a.size())) ++array_, at_ = 0;
    }
  }

 private:
  std::span<const std::span<float>> arrays_;
  size_t array_ = 0;
  int64_t at_ = 0;
};

class Mpi final : public MpiLibrary {
 public:
  void start() override {
    // A lost process must not end this one before it logs the reason: UCX aborts when it reads that process's memory,
    // and Hydra sends SIGUSR1.
    ::setenv("UCX_TLS", "^cma", 0);
    struct sigaction before {};
    if (::sigaction(SIGUSR1, nullptr, &before) == 0 && before.sa_handler == SIG_DFL) std::signal(SIGUSR1, SIG_IGN);
    int provided = 0;
    succeed(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    check(provided == MPI_THREAD_MULTIPLE, Code::device, "MPI: this library supports calls from one thread only");
    succeed(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    succeed(MPI_Comm_dup(MPI_COMM_WORLD, &all_), "MPI_Comm_dup");
    succeed(MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &count_);
  }

  int64_t rank() const override { return rank_; }
  int64_t count() const override { return count_; }

  std::string from_first(const std::string& text) override {
    uint64_t size = text.size();
    succeed(MPI_Bcast(&size, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD), "MPI_Bcast");
    std::string out = text;
    out.resize(size);
    succeed(MPI_Bcast(out.data(), static_cast<int>(size), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    return out;
  }

  void broadcast(std::span<std::byte> bytes) override {
    while (!bytes.empty()) {
      const std::span<std::byte> part = bytes.first(std::min(bytes.size(), kMostBytes));
      MPI_Request request = MPI_REQUEST_NULL;
      succeed(MPI_Ibcast(part.data(), static_cast<int>(part.size()), MPI_BYTE, 0, all_, &request), "MPI_Ibcast");
      wait(request, "MPI_Ibcast");
      bytes = bytes.subspan(part.size());
    }
  }

  void open(int64_t devices) override {
    while (static_cast<int64_t>(devices_.size()) < devices) {
      Device d;
      succeed(MPI_Comm_dup(MPI_COMM_WORLD, &d.processes), "MPI_Comm_dup");
      succeed(MPI_Comm_set_errhandler(d.processes, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
      devices_.push_back(std::move(d));
    }
  }

  void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) override {
    check(device >= 0 && device < static_cast<int64_t>(devices_.size()), Code::internal,
          "MPI: no communicator for device {} of {}", device, devices_.size());
    Device& d = devices_[static_cast<size_t>(device)];
    int64_t left = 0;
    for (const auto& a : arrays) left += static_cast<int64_t>(a.size());
    Joined from(arrays), to(arrays);
    while (left > 0) {
      const int64_t n = std::min(left, kBlock);
      sum_block(d, n, scale, from, to);
      left -= n;
    }
  }

  void finish() override {
    for (Device& d : devices_) MPI_Comm_free(&d.processes);
    devices_.clear();
    MPI_Comm_free(&all_);
    MPI_Finalize();
  }

 private:
  struct Device {
    MPI_Comm processes = MPI_COMM_NULL;
    std::vector<float> block, parts;  // elements of one block; all processes' values of this one's part
  };
  static constexpr size_t kMostBytes = size_t{1} << 28;  // bytes per broadcast
  static constexpr int64_t kBlock = int64_t{1} << 22;    // elements per message: 16 MiB

  void sum_block(Device& d, int64_t n, float scale, Joined& from, Joined& to) const {
    std::vector<int> sizes, starts;  // of each process's part of the block
    for (int64_t r = 0; r < count_; ++r) {
      starts.push_back(static_cast<int>(n * r / count_));
      sizes.push_back(static_cast<int>(n * (r + 1) / count_) - starts.back());
    }
    const auto local_size = static_cast<size_t>(sizes[static_cast<size_t>(rank_)]);
    std::vector<int> local_sizes(static_cast<size_t>(count_), static_cast<int>(local_size)), local_starts;
    for (int64_t r = 0; r < count_; ++r) local_starts.push_back(static_cast<int>(local_size) * static_cast<int>(r));
    d.block.resize(static_cast<size_t>(n));
    d.parts.resize(local_size * static_cast<size_t>(count_));
    float* at = d.block.data();
    from.next(n, [&](const float* memory, int64_t part) { at = std::copy_n(memory, part, at); });

    MPI_Request request = MPI_REQUEST_NULL;
    succeed(MPI_Ialltoallv(d.block.data(), sizes.data(), starts.data(), MPI_FLOAT, d.parts.data(), local_sizes.data(),
                           local_starts.data(), MPI_FLOAT, d.processes, &request),
            "MPI_Ialltoallv");
    wait(request, "MPI_Ialltoallv");
    float* sums = d.parts.data();
    for (size_t r = 1; r < static_cast<size_t>(count_); ++r)
      for (size_t i = 0; i < local_size; ++i) sums[i] += d.parts[r * local_size + i];
    for (size_t i = 0; i < local_size; ++i) sums[i] *= scale;
    succeed(MPI_Iallgatherv(sums, static_cast<int>(local_size), MPI_FLOAT, d.block.data(), sizes.data(), starts.data(),
                            MPI_FLOAT, d.processes, &request),
            "MPI_Iallgatherv");
    wait(request, "MPI_Iallgatherv");
    const float* sum = d.block.data();
    to.next(n, [&](float* memory, int64_t part) {
      std::copy_n(sum, part, memory);
      sum += part;
    });
  }

  int rank_ = 0, count_ = 1;
  MPI_Comm all_ = MPI_COMM_NULL;  // for broadcasts
  std::vector<Device> devices_;
};

}  // namespace
}  // namespace md

extern "C" md::MpiLibrary* md_mpi_library() {
  static md::Mpi library;
  return &library;
}
