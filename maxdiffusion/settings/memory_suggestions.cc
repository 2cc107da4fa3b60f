#include "maxdiffusion/settings/memory_suggestions.h"

#include <fmt/format.h>

#include <cmath>

namespace md {

std::vector<MemorySuggestion> memory_suggestions(const MemoryKeys& k, const Mesh& mesh, bool trains, bool offloads) {
  std::vector<MemorySuggestion> all;
  auto add = [&](const std::string& words, auto change) {
    all.push_back({words, k});
    change(all.back().keys);
  };
  const std::string& policy = k.layers.remat_policy;
  constexpr const char* kOffload = "HIDDEN_STATE_WITH_OFFLOAD";
  const bool offloaded = policy == kOffload && k.layers.scan_layers;
  const bool stores_activations = trains && policy != "FULL" && !offloaded;  // for the backward pass
  if (stores_activations) add("remat_policy=FULL", [](MemoryKeys& d) { d.layers.remat_policy = "FULL"; });
  if (k.layers.attention == "dot_product") add("attention=flash", [](MemoryKeys& d) { d.layers.attention = "flash"; });
  if (mesh.size("data") > 1)
    add("ici_data_parallelism=1 ici_fsdp_parallelism=-1", [](MemoryKeys& d) {
      d.mesh.ici_data_parallelism = 1;
      d.mesh.ici_fsdp_parallelism = -1;
    });
  // The values that FULL stores on the device are offloaded to the host, one layer at a time.
  if (trains && offloads && !offloaded)
    add(fmt::format("remat_policy={} scan_layers=true", kOffload), [](MemoryKeys& d) {
      d.layers.remat_policy = kOffload;
      d.layers.scan_layers = true;
    });
  for (double batch = k.batches.per_device_batch_size / 2; k.batches.global_batch_size <= 0 && batch >= 1; batch /= 8)
    add(fmt::format("{}per_device_batch_size={:g}", stores_activations ? "remat_policy=FULL " : "", std::floor(batch)),
        [&](MemoryKeys& d) {
          if (stores_activations) d.layers.remat_policy = "FULL";
          d.batches.per_device_batch_size = std::floor(batch);
        });
  return all;
}

}  // namespace md
