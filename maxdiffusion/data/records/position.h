// The position in a stream of records or a dataset.
#pragma once

#include <cstdint>

namespace md {

/// Enough for a dataset to continue with exactly the next batch after a restart.
struct Position {
  int64_t epoch = 0, index = 0;  // samples taken in this epoch
  // Where samples are read in order and shuffled in windows (records.h): where the current window starts, as a shard of
  // the epoch's order and a place within it, and the samples of the window already taken. Otherwise 0.
  int64_t shard = 0, offset = 0, taken = 0;
  bool operator==(const Position&) const = default;
};

}  // namespace md
