#include "maxdiffusion/settings/memory_suggestions.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace md {
namespace {

using Words = std::vector<std::string>;
constexpr const char* kOffload = "remat_policy=HIDDEN_STATE_WITH_OFFLOAD scan_layers=true";

Words words(const RunConfig& c, bool trains, bool offloads) {
  Words all;
  for (const MemorySuggestion& change : memory_suggestions(c, Mesh::single(), trains, offloads))
    all.push_back(change.words);
  return all;
}

TEST(MemorySuggestions, TryTheHostsMemoryWhereDevicesHaveTheirOwn) {
  RunConfig c;
  c.batches.per_device_batch_size = 2;
  EXPECT_EQ(words(c, true, true),
            (Words{"remat_policy=FULL", "attention=flash", kOffload, "remat_policy=FULL per_device_batch_size=1"}));
  EXPECT_EQ(words(c, true, false),
            (Words{"remat_policy=FULL", "attention=flash", "remat_policy=FULL per_device_batch_size=1"}));
  EXPECT_EQ(words(c, false, true), (Words{"attention=flash", "per_device_batch_size=1"}));
  const auto changes = memory_suggestions(c, Mesh::single(), true, true);
  EXPECT_EQ(changes[2].config.layers.remat_policy, "HIDDEN_STATE_WITH_OFFLOAD");
  EXPECT_TRUE(changes[2].config.layers.scan_layers);
  // What is so already is not tried, and nothing is taken back.
  c = changes[2].config;
  EXPECT_EQ(words(c, true, true), (Words{"attention=flash", "per_device_batch_size=1"}));
}

}  // namespace
}  // namespace md
