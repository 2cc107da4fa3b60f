// training_state/state.json: what a checkpoint says of its run beside arrays.
#pragma once

#include <cstdint>
#include <string>

#include "maxdiffusion/data/records/position.h"

namespace md {

struct StateInfo {
  int64_t step = 0;
  uint64_t seed = 0;
  Position data;
};
/// `file`: from which the text is, of the checkpoint of `step`. Throws io naming the member that is missing or no
/// number that it can be.
StateInfo parse_state_info(const std::string& text, const std::string& file, int64_t step);

}  // namespace md
