// training_state/state.json: what a checkpoint records of its run in addition to arrays.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "maxdiffusion/data/records/data_identity.h"
#include "maxdiffusion/data/records/position.h"

namespace md {

struct StateInfo {
  int64_t step = 0;
  uint64_t seed = 0;
  Position data;
  DataIdentity dataset;              // of its run's data; not known in checkpoints of earlier versions
  std::vector<std::string> trained;  // components; empty in checkpoints of versions that did not record them
};
/// `file`: source of the text, in the checkpoint of `step`. Throws io naming a field that is missing or out of range.
StateInfo parse_state_info(const std::string& text, const std::string& file, int64_t step);

}  // namespace md
