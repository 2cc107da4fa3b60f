// Changes that commonly make a program fit its devices.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/data/data_keys.h"
#include "maxdiffusion/mesh/mesh.h"
#include "maxdiffusion/nn/layer_keys.h"

namespace md {

/// The keys that decide how much memory a step takes, and can be changed.
struct MemoryKeys {
  LayerKeys layers;
  MeshConfig mesh;
  BatchKeys batches;
};
struct MemorySuggestion {
  std::string words;  // for a command line
  MemoryKeys keys;    // with them
};
/// Of the programs of a run with these keys, or where `trains` of its training step, on this mesh. Best first: what
/// costs least. `offloads`: devices have memory besides the host's.
std::vector<MemorySuggestion> memory_suggestions(const MemoryKeys& keys, const Mesh& mesh, bool trains, bool offloads);

}  // namespace md
