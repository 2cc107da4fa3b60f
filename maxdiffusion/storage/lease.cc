// The lease file: a line with the owner for people, and a line that identifies the process on its machine.
#include "maxdiffusion/storage/lease.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/periodic_thread.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

constexpr std::chrono::seconds kPeriod{15}, kDead{60};
constexpr int kAttempts = 3;

/// First line of a system file, or "".
std::string line_of(const std::string& path) {
  std::string line;
  if (FILE* f = std::fopen(path.c_str(), "r")) {
    for (int c; (c = std::fgetc(f)) != EOF && c != '\n';) line += static_cast<char>(c);
    std::fclose(f);
  }
  return line;
}

/// Start time of a process; "" if it does not exist.
std::string start_of(int64_t process) {
  const std::string line = line_of(fmt::format("/proc/{}/stat", process));
  size_t at = line.rfind(')');  // the name may contain blanks
  for (int field = 2; field < 22 && at != std::string::npos; ++field) at = line.find(' ', at + 1);
  return at == std::string::npos ? "" : line.substr(at + 1, line.find(' ', at + 1) - at - 1);
}

/// Identifies this machine since its boot, and this PID namespace.
std::string machine() {
  std::error_code ec;
  return line_of("/proc/sys/kernel/random/boot_id") + " " +
         std::filesystem::read_symlink("/proc/self/ns/pid", ec).string();
}

struct Other {
  std::string owner;
  int64_t quiet = 0;   // ns since its last renewal
  bool local = false;  // its process is on this machine
};

}  // namespace

struct Lease::Impl {
  std::string folder, file, text;
  std::unique_ptr<PeriodicThread> signs;  // declared last, so that it ends before the members it uses

  void sign() const { put_text(file, text); }

  void check_owned(bool present) const {
    md::check(present, Code::io, "'{}': another run uses it now; the lease of this run expired", shown(folder));
  }

  /// Process id and start time if the lease belongs to a process of this machine; else empty.
  static std::string process_here(const std::string& text) {
    const std::string where = machine();
    std::string line = text.substr(std::min(text.find('\n') + 1, text.size()));
    while (line.ends_with('\n')) line.pop_back();
    return line.starts_with(where + " ") ? line.substr(where.size() + 1) : "";
  }
  static bool is_dead(const std::string& process) {
    const size_t blank = process.find(' ');
    return blank != std::string::npos && start_of(std::atoll(process.c_str())) != process.substr(blank + 1);
  }

  /// Another process's valid lease. Removes expired ones.
  std::optional<Other> other() const {
    const std::vector<FoundFile> all = list_all_files(below(folder, ".lock"));
    const auto path = [](const FoundFile& f) { return split_location(f.location).path; };
    const auto mine = std::ranges::find(all, split_location(file).path, path);
    check_owned(mine != all.end());
    for (const FoundFile& f : all) {
      if (path(f) == path(*mine)) continue;
      std::string lease_text = "another process";
      try {
        lease_text = get_text(f.location);
      } catch (const Error&) {  // it was just released
        if (!find_file(f.location)) continue;
      }
      const int64_t quiet = mine->modified - f.modified;
      const std::string local_process = process_here(lease_text);
      if (quiet <= std::chrono::nanoseconds(kDead).count() && !is_dead(local_process))
        return Other{lease_text.substr(0, lease_text.find('\n')), std::max<int64_t>(quiet, 0), !local_process.empty()};
      log_info("'{}': the lease of {} has expired", shown(folder), lease_text.substr(0, lease_text.find('\n')));
      remove_file(f.location);
    }
    return {};
  }
};

Lease::Lease(const std::string& folder, const std::string& owner, std::chrono::seconds patience)
    : impl_(std::make_unique<Impl>()) {
  const auto end = std::chrono::steady_clock::now() + patience;
  std::random_device random;
  const int64_t process = ::getpid();
  impl_->folder = folder;
  impl_->file = below(folder, fmt::format(".lock/{:08x}{:08x}", random(), random()));
  impl_->text = fmt::format("{}\n{} {} {}\n", owner, machine(), process, start_of(process));
  for (int attempt = 1;; ++attempt) {
    impl_->sign();
    const std::optional<Other> other = impl_->other();
    if (!other) break;
    remove_file(impl_->file);
    // Two processes that start at the same time both withdraw and retry; a process of this machine may also be exiting.
    if (attempt < kAttempts || (other->local && std::chrono::steady_clock::now() < end)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100 + random() % 900));
      continue;
    }
    throw Error(Code::io, fmt::format("'{}' is in use by {}; its lease was renewed {} s ago", shown(folder),
                                      other->owner, other->quiet / 1'000'000'000))
        .note(fmt::format("try: another run_name, or wait {} s: then the lease of a dead run expires", kDead.count()));
  }
  impl_->signs = std::make_unique<PeriodicThread>(fmt::format("'{}' is held by this run", shown(folder)), kPeriod,
                                                  [impl = impl_.get()] {
                                                    impl->check_owned(find_file(impl->file).has_value());
                                                    impl->sign();
                                                    return false;
                                                  });
}

Lease::~Lease() {
  impl_->signs.reset();
  try {
    remove_file(impl_->file);
  } catch (const std::exception& e) {
    log_warning("'{}': the lease cannot be removed: {}", shown(impl_->folder), e.what());
  }
}

void Lease::check() const {
  const std::optional<Other> other = impl_->other();
  md::check(!other, Code::io, "'{}' is also in use by {}; this run writes nothing more there", shown(impl_->folder),
            other ? other->owner : "");
}

}  // namespace md
