#include "maxdiffusion/processes/processes.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/exit_status.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shared_library.h"
#include "maxdiffusion/processes/launch.h"
#include "maxdiffusion/processes/mpi_library.h"
#include "maxdiffusion/processes/rendezvous.h"
#include "maxdiffusion/processes/tpu_workers.h"

namespace md {
namespace {

class Alone final : public Processes {
 public:
  int64_t rank() const override { return 0; }
  int64_t count() const override { return 1; }
  std::vector<std::string> gather(const std::string&, const std::string& mine) override { return {mine}; }
  std::vector<std::string> gather_at_coordinator(const std::string&, const std::string& mine) override {
    return {mine};
  }
  void put(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  void broadcast(std::span<std::byte>) override {}
  void open_sums(int64_t) override {}
  void sum(int64_t, std::span<const std::span<float>> arrays, float scale) override {
    for (std::span<float> a : arrays)
      for (float& v : a) v *= scale;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

std::string new_secret() {
  std::random_device bits;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", bits(), bits(), bits(), bits());
}

/// Exits immediately, because threads may be waiting for the lost process.
[[noreturn]] void end_job(const std::string& why) {
  set_status_line("");
  log_error("{}\n  this process exits too; the same command resumes from the newest checkpoint", why);
  std::_Exit(exit_status(Code::device));
}

class Joined final : public Processes {
 public:
  explicit Joined(const Launch& launch) : launch_(launch) {
    RendezvousOptions options{.rank = launch.rank, .count = launch.count, .lost = end_job};
    if (!launch.coordinator.empty()) {
      // Hosts start at different times. The port is open within the network, and the secret is not secret.
      options.port = kTpuPort, options.secret = "tpu of " + launch.coordinator,
      options.joining = std::chrono::minutes(5);
      rendezvous_ = std::make_unique<Rendezvous>(options);
      rendezvous_->join(launch.rank == 0 ? "" : Rendezvous::address_of(launch.coordinator, kTpuPort));
      return;
    }
    mpi_ = &open_library<MpiLibrary>("md_mpi.so", "md_mpi_library", "several processes");
    mpi_->start();
    check(mpi_->rank() == launch.rank && mpi_->count() == launch.count, Code::device,
          "{}: process {} of {}; MPI: process {} of {}; expected the same; is the launcher MPICH's?", launch.by,
          launch.rank, launch.count, mpi_->rank(), mpi_->count());
    options.secret = mpi_->from_first(new_secret());
    rendezvous_ = std::make_unique<Rendezvous>(options);
    rendezvous_->join(mpi_->from_first(launch.rank == 0 ? rendezvous_->address() : ""));
  }

  int64_t rank() const override { return launch_.rank; }
  int64_t count() const override { return launch_.count; }
  std::vector<std::string> gather(const std::string& topic, const std::string& mine) override {
    return rendezvous_->gather(topic, mine);
  }
  std::vector<std::string> gather_at_coordinator(const std::string& topic, const std::string& mine) override {
    return rendezvous_->gather(topic, mine, true);
  }
  void put(const std::string& key, const std::string& value) override { rendezvous_->put(key, value); }
  std::optional<std::string> get(const std::string& key) override { return rendezvous_->get(key); }
  void broadcast(std::span<std::byte> bytes) override {
    by_mpi([&] { mpi().broadcast(bytes); });
  }
  void open_sums(int64_t devices) override { mpi().open(devices); }
  void sum(int64_t device, std::span<const std::span<float>> arrays, float scale) override {
    by_mpi([&] { mpi().sum(device, arrays, scale); });
  }
  void leave(bool well) {
    if (well) {
      barrier("end");
      if (mpi_ != nullptr) mpi_->finish();
    }
    rendezvous_->leave(well);
  }

 private:
  template <class F>
  static void by_mpi(F&& act) {
    try {
      act();
    } catch (const Error&) {
      // MPI's message does not name the process; the rendezvous detects it, and ends this process.
      std::this_thread::sleep_for(std::chrono::seconds(8));
      throw;
    }
  }

  MpiLibrary& mpi() const {
    check(mpi_ != nullptr, Code::internal, "processes on TPUs have no MPI");
    return *mpi_;
  }

  Launch launch_;
  MpiLibrary* mpi_ = nullptr;
  std::unique_ptr<Rendezvous> rendezvous_;
};

/// Whether all processes end because of one error (throw_together).
std::atomic<bool>& all_stop() {
  static std::atomic<bool> stop = false;
  return stop;
}

std::unique_ptr<Joined>& joined() {
  static std::unique_ptr<Joined> j;
  return j;
}

}  // namespace

int64_t Processes::largest(const std::string& topic, int64_t mine) {
  if (alone()) return mine;
  int64_t most = mine;
  for (const std::string& text : gather(topic, std::to_string(mine))) {
    int64_t value = mine;
    std::from_chars(text.data(), text.data() + text.size(), value);
    most = std::max(most, value);
  }
  return most;
}

LocalRank local_rank(Processes& all) {
  const std::vector<std::string> hosts = all.gather("hosts", host_name());
  const auto this_host = hosts.begin() + all.rank();
  return {std::count(hosts.begin(), this_host, *this_host), std::ranges::count(hosts, *this_host)};
}

Processes& processes() {
  static Alone alone;
  return joined() ? static_cast<Processes&>(*joined()) : alone;
}

std::string mpi_problem() try {
  open_library<MpiLibrary>("md_mpi.so", "md_mpi_library", "several processes");
  return "";
} catch (const Error& e) {
  return e.message();
}

void join_processes(bool on_tpus) {
  if (joined()) return;
  Launch launch = launch_of_environment();
  if (launch.by.empty() && on_tpus) launch = tpu_worker_of_machine();
  if (launch.count == 1) return;
  if (launch.rank > 0) {
    set_log_prefix(fmt::format("[{}] ", launch.rank));
    set_log_level(LogLevel::warning);
  }
  joined() = std::make_unique<Joined>(launch);
  share_interrupts();
  log_info("process 0 of {} ({})", launch.count, launch.by);
}

void leave_processes(bool well) {
  if (joined()) joined()->leave(well || all_stop());
}

void throw_together(Processes& all, const std::string& topic, const std::optional<Error>& mine) {
  const std::string text = mine ? fmt::format("{} {}", static_cast<int>(mine->code()), mine->what()) : "";
  for (const std::string& found : all.gather(topic, text)) {
    if (found.empty()) continue;
    all_stop() = true;
    if (mine) throw Error(*mine);
    throw Error(static_cast<Code>(std::stoi(found)), found.substr(found.find(' ') + 1));
  }
}

}  // namespace md
