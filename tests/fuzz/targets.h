// Every parser of this program as a function of the bytes of one file, with whole files to damage.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace md {

struct FuzzTarget {
  std::string name;
  int64_t files;                   // damaged ones in a run of the tests: about two seconds of one processor
  std::vector<std::string> seeds;  // the bytes of files that are accepted
  /// Reads the bytes; throws md::Error where it refuses them. `folder` is the caller's, and empty but for what earlier
  /// calls have left.
  std::function<void(const std::string& bytes, const std::string& folder)> read;
};

std::vector<FuzzTarget> fuzz_targets();

}  // namespace md
