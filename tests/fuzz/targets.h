// Every parser of this program as a function of one file's bytes, with intact files to damage.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace md {

struct FuzzTarget {
  std::string name;
  int64_t files;                   // damaged files per test run: about two CPU seconds
  std::vector<std::string> seeds;  // contents of valid files
  /// Parses the bytes; throws md::Error if they are invalid. `folder` belongs to the caller and holds only what earlier
  /// calls left.
  std::function<void(const std::string& bytes, const std::string& folder)> read;
};

std::vector<FuzzTarget> fuzz_targets();

}  // namespace md
