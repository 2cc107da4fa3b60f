// Suggests key changes that make a program fit its devices.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/data/data_keys.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/nn/layer_keys.h"

namespace md {

/// The keys that determine how much memory a step needs.
struct MemoryKeys {
  LayerKeys layers;
  MeshConfig mesh;
  BatchKeys batches;
  int64_t accumulation = 1;         // gradient_accumulation_steps
  std::string optimizer = "adamw";  // its name
};
struct MemorySuggestion {
  std::string words;  // for a command line
  MemoryKeys keys;    // with these changes
};
/// Suggestions for the programs of a run with these keys on this mesh; `trains`: for its training step. Cheapest first.
/// `offloads`: devices have memory separate from the host's.
std::vector<MemorySuggestion> memory_suggestions(const MemoryKeys& keys, const Mesh& mesh, bool trains, bool offloads);

}  // namespace md
