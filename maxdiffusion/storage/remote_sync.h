// Uploads local folders to an object store in the background.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace md {

/// Uploads new and changed files on a separate thread; writers do not wait. Each upload is a snapshot of the file, so a
/// growing file is complete up to some point. Skips temporary files and names that begin with a dot. Removes nothing
/// from the bucket. Retries failed uploads; the local files stay. Thread safe.
class RemoteSync {
 public:
  /// A local folder or file, and its location in the object store.
  struct Pair {
    std::string local, location;
  };
  /// `left_out`: names of folders, at any depth, that are not uploaded.
  RemoteSync(std::vector<Pair> pairs, std::set<std::string> left_out);
  /// Calls settle(); logs its error.
  ~RemoteSync();
  /// Hint that a file changed; other changes are found within seconds.
  void changed();
  /// Returns when the current files are uploaded. Throws io.
  void settle();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
