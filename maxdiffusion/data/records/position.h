// The position in a stream of records or a dataset.
#pragma once

#include <cstdint>

namespace md {

/// With it a dataset continues with exactly the next batch after a restart.
struct Position {
  int64_t epoch = 0, index = 0;  // samples consumed in this epoch
  // For samples that are read in order and shuffled in windows (records.h): the start of the current window, as a shard
  // of the epoch's order and an offset within it, and the number of its samples already consumed. Otherwise 0.
  int64_t shard = 0, offset = 0, consumed = 0;
  bool operator==(const Position&) const = default;
};

}  // namespace md
