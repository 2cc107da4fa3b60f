// What files of other programs call an array that has a published name here, and where in theirs it lies.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace md {

struct WeightAlias {
  std::string prefix = {};  // what files that hold several models put before the names of this one; may be empty
  std::string name;         // behind the prefix
  std::vector<int64_t> part = {0};  // the array is these, in this order, of the file's equal parts along the first axis
  int64_t parts = 1;
  bool transposed = false;  // of a matrix
  int64_t ones = 0;         // sizes of 1 that the file has behind the array's own

  std::string whole() const { return prefix + name; }
};

/// Of one model.
struct WeightNameMap {
  /// Those of the array that is published as `name`, likeliest first. Empty: there are none.
  std::function<std::vector<WeightAlias>(const std::string& name)> of = {};
  /// Beginnings, with their prefix, of names in such files that the model does without.
  std::vector<std::string> unneeded = {};
};

}  // namespace md
