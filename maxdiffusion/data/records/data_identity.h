// What a checkpoint records of its run's data, so that a resumed run can say what has changed.
#pragma once

#include <cstdint>
#include <string>

namespace md {

/// Equal for a copy of the data in another place, and for files with other times. An empty hash is not known, or of
/// something that this kind of data does not have.
struct DataIdentity {
  int64_t samples = -1;  // −1: not known
  std::string names;     // hash of the records' names, of records that are files
  std::string captions;  // hash of the captions, of records that are files
  std::string files;     // hash of the names and sizes of files that hold many records

  bool operator==(const DataIdentity&) const = default;
};
/// Of two sets of records that are trained on together.
DataIdentity combined(const DataIdentity& a, const DataIdentity& b);
/// What is known to have changed: "it had 5 samples and has 3". Empty: nothing.
std::string change_between(const DataIdentity& then, const DataIdentity& now);

}  // namespace md
