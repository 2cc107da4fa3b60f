// Layers that some rows of a batch skip, so that guidance can lead away from that prediction.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace md {

/// Paths are those of scopes, relative to the model's root.
struct Perturbation {
  int64_t first = 0;                      // first perturbed row of the batch
  std::set<std::string> attentions = {};  // self attentions in which each token attends only to itself
  std::string blocks = {};                // path of nn::repeat
  std::set<int64_t> skipped = {};         // indices in `blocks` of blocks that return their input
};

}  // namespace md
