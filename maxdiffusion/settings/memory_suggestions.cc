#include "maxdiffusion/settings/memory_suggestions.h"

#include <fmt/format.h>

#include <cmath>

namespace md {

std::vector<MemorySuggestion> memory_suggestions(const RunConfig& c, const Mesh& mesh, bool trains, bool offloads) {
  std::vector<MemorySuggestion> all;
  auto add = [&](const std::string& words, auto change) {
    all.push_back({words, c});
    change(all.back().config);
  };
  const std::string& policy = c.layers.remat_policy;
  constexpr const char* kOffload = "HIDDEN_STATE_WITH_OFFLOAD";
  const bool offloaded = policy == kOffload && c.layers.scan_layers;
  const bool keeps = trains && policy != "FULL" && !offloaded;  // values for the way back
  if (keeps) add("remat_policy=FULL", [](RunConfig& d) { d.layers.remat_policy = "FULL"; });
  if (c.layers.attention == "dot_product") add("attention=flash", [](RunConfig& d) { d.layers.attention = "flash"; });
  if (mesh.size("data") > 1)
    add("ici_data_parallelism=1 ici_fsdp_parallelism=-1", [](RunConfig& d) {
      d.mesh.ici_data_parallelism = 1;
      d.mesh.ici_fsdp_parallelism = -1;
    });
  // What FULL keeps on the device goes to the host and comes back, a layer at a time.
  if (trains && offloads && !offloaded)
    add(fmt::format("remat_policy={} scan_layers=true", kOffload), [](RunConfig& d) {
      d.layers.remat_policy = kOffload;
      d.layers.scan_layers = true;
    });
  for (double batch = c.batches.per_device_batch_size / 2; c.batches.global_batch_size <= 0 && batch >= 1; batch /= 8)
    add(fmt::format("{}per_device_batch_size={:g}", keeps ? "remat_policy=FULL " : "", std::floor(batch)),
        [&](RunConfig& d) {
          if (keeps) d.layers.remat_policy = "FULL";
          d.batches.per_device_batch_size = std::floor(batch);
        });
  return all;
}

}  // namespace md
