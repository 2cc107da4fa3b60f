#include "maxdiffusion/storage/remote_sync.h"

#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <optional>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/periodic_thread.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kPeriod{5};

/// Identifies a version of a file.
using Stamp = std::tuple<ino_t, int64_t, int64_t>;  // inode, size, ns since 1970

std::optional<Stamp> stamp_of(const std::string& path) {
  struct stat s {};
  if (::stat(path.c_str(), &s) != 0 || !S_ISREG(s.st_mode)) return {};
  return Stamp{s.st_ino, s.st_size, s.st_mtim.tv_sec * 1'000'000'000 + s.st_mtim.tv_nsec};
}

}  // namespace

struct RemoteSync::Impl {
  struct Place : Pair {
    std::optional<std::map<std::string, FoundFile>> before;  // by location's path, when this process started
  };
  std::vector<Place> places;
  std::set<std::string> left_out;
  std::map<std::string, Stamp> uploaded;   // by local path
  std::unique_ptr<PeriodicThread> thread;  // declared last, so that it ends before the members it uses

  /// Paths relative to a local folder; "" if it is a file.
  std::vector<std::string> files_of(const Place& place) const {
    std::error_code ec;
    if (fs::is_regular_file(place.local, ec)) return {""};
    std::vector<std::string> files;
    for (fs::recursive_directory_iterator it(place.local, ec), end; !ec && it != end; it.increment(ec)) {
      const std::string name = it->path().filename();
      if (name.starts_with('.') || left_out.contains(name))
        it.disable_recursion_pending();
      else if (it->is_regular_file(ec) && name.find(".tmp-") == std::string::npos)
        files.push_back(it->path().lexically_relative(place.local).string());
    }
    return files;
  }

  /// Whether the bucket had this version of the file before this process wrote anything.
  static bool was_there(Place& place, const std::string& location, const Stamp& now) {
    if (!place.before) {
      place.before.emplace();
      for (FoundFile& f : list_all_files(place.location))
        place.before->emplace(split_location(f.location).path, std::move(f));
    }
    constexpr int64_t kSecond = 1'000'000'000;  // S3 stores whole seconds
    const auto found = place.before->find(split_location(location).path);
    return found != place.before->end() && found->second.size == std::get<1>(now) &&
           found->second.modified / kSecond >= std::get<2>(now) / kSecond;
  }

  void carry_over() {
    for (Place& place : places)
      for (const std::string& file : files_of(place)) {
        const std::string local = file.empty() ? place.local : place.local + "/" + file,
                          location = file.empty() ? place.location : below(place.location, file);
        const std::optional<Stamp> now = stamp_of(local);
        if (!now) continue;  // removed meanwhile
        const auto known = uploaded.find(local);
        if (known != uploaded.end() ? known->second == *now : was_there(place, location, *now)) continue;
        put_file(local, location);
        uploaded[local] = *now;
      }
  }
};

RemoteSync::RemoteSync(std::vector<Pair> pairs, std::set<std::string> left_out) : impl_(std::make_unique<Impl>()) {
  for (Pair& p : pairs) impl_->places.push_back({std::move(p), {}});
  impl_->left_out = std::move(left_out);
  impl_->thread =
      std::make_unique<PeriodicThread>("files for a bucket wait on this machine", kPeriod, [impl = impl_.get()] {
        impl->carry_over();
        return false;
      });
}

RemoteSync::~RemoteSync() {
  try {
    settle();
  } catch (const std::exception& e) {
    for (const auto& place : impl_->places)
      log_error("{} lacks files of '{}': {}", shown(place.location), place.local, e.what());
  }
}

void RemoteSync::changed() { impl_->thread->trigger(); }

void RemoteSync::settle() { impl_->thread->run_now(); }

}  // namespace md
