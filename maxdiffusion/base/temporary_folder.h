// A folder for one test or one scratch task, removed with everything in it at the end of its scope.
#pragma once

#include <string>

namespace md {

class TemporaryFolder {
 public:
  /// In the system's folder for temporary files, or in `parent`.
  explicit TemporaryFolder(const std::string& parent = "");
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  /// "<folder>/<name>".
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace md
