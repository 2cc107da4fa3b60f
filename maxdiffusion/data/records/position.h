// The position in a stream of records or a dataset.
#pragma once

#include <cstdint>

#include "maxdiffusion/base/error.h"

namespace md {

/// With it a dataset continues with exactly the next batch after a restart.
struct Position {
  int64_t epoch = 0, index = 0;  // samples consumed in this epoch
  // For samples that are read in order and shuffled in windows (records.h): the start of the current window, as a shard
  // of the epoch's order and an offset within it, and the number of its samples already consumed. Otherwise 0.
  int64_t shard = 0, offset = 0, consumed = 0;
  bool operator==(const Position&) const = default;
};

/// Where training continues if the data lacks a position: at the beginning of the epoch after it.
inline Position next_epoch(const Position& p) { return {.epoch = p.epoch + 1}; }
/// Throws io for numbers below 0.
inline void check_position(const Position& p) {
  check(p.epoch >= 0 && p.index >= 0 && p.shard >= 0 && p.offset >= 0 && p.consumed >= 0, Code::io,
        "resume: position {} of epoch {} (shard {}, offset {}, {} consumed); expected numbers of 0 or more", p.index,
        p.epoch, p.shard, p.offset, p.consumed);
}

}  // namespace md
