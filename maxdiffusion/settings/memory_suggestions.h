// What commonly makes a program fit its devices.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/settings/run_config.h"

namespace md {

struct MemorySuggestion {
  std::string words;  // for a command line
  RunConfig config;   // with them
};
/// Of the programs of `config`, or where `trains` of its training step, on this mesh. Best first: what costs least.
/// `offloads`: devices have memory of their own beside the host's.
std::vector<MemorySuggestion> memory_suggestions(const RunConfig& config, const Mesh& mesh, bool trains, bool offloads);

}  // namespace md
