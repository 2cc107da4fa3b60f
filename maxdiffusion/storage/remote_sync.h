// A bucket's copy of what is written to folders of this machine.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace md {

/// Carries over, on a thread of its own, every file that appears or changes; nothing that writes waits for it. A file
/// is in the bucket as it was at some moment: one that only grows is so whole up to there. Files whose names begin with
/// a dot, and temporary ones, stay here. Nothing is removed from the bucket. What fails is tried again, and is here all
/// the while. Thread safe.
class RemoteSync {
 public:
  /// A folder of this machine, or a file, and the location that is to hold the same.
  struct Pair {
    std::string local, location;
  };
  /// `left_out`: names of folders, anywhere below, that somebody else takes care of.
  RemoteSync(std::vector<Pair> pairs, std::set<std::string> left_out);
  /// Settles; logs what fails.
  ~RemoteSync();
  /// There is something new. What nobody says is found within seconds.
  void changed();
  /// Returns when what is here now is there too. Throws io.
  void settle();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
