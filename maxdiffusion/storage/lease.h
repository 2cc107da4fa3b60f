// One owner at a time of a folder in a bucket.
#pragma once

#include <chrono>
#include <memory>
#include <string>

namespace md {

/// Held while it lives. Arrow's filesystems cannot create a file only where there is none, so each who asks puts a file
/// of its own into <folder>/.lock/ and then lists it: storages show at once what was written, so that of two, one at
/// least sees the other, and who sees another steps back. The file is written anew every few seconds; one that was not
/// for a minute by the storage's own clock, or whose process this machine knows to be dead, counts for nothing. Thread
/// safe.
class Lease {
 public:
  /// Where a process of this machine has the folder, it may be ending: it is waited for. Throws io naming who has the
  /// folder then.
  Lease(const std::string& folder, const std::string& who, std::chrono::seconds patience = std::chrono::seconds(10));
  /// Lets go.
  ~Lease();
  Lease(const Lease&) = delete;
  /// Throws io where another has the folder by now, because this process gave no sign for too long.
  void check() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
