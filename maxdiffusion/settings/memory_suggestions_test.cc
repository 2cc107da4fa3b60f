#include "maxdiffusion/settings/memory_suggestions.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace md {
namespace {

using Words = std::vector<std::string>;
constexpr const char* kOffload = "remat_policy=HIDDEN_STATE_WITH_OFFLOAD scan_layers=true";

Words words(const MemoryKeys& k, bool trains, bool offloads) {
  Words all;
  for (const MemorySuggestion& change : memory_suggestions(k, Mesh::single(), trains, offloads))
    all.push_back(change.words);
  return all;
}

TEST(MemorySuggestions, TryTheHostsMemoryWhereDevicesHaveTheirOwn) {
  MemoryKeys k;
  k.batches.per_device_batch_size = 2;
  EXPECT_EQ(words(k, true, true),
            (Words{"remat_policy=FULL", "attention=flash", kOffload, "remat_policy=FULL per_device_batch_size=1"}));
  EXPECT_EQ(words(k, true, false),
            (Words{"remat_policy=FULL", "attention=flash", "remat_policy=FULL per_device_batch_size=1"}));
  EXPECT_EQ(words(k, false, true), (Words{"attention=flash", "per_device_batch_size=1"}));
  const auto changes = memory_suggestions(k, Mesh::single(), true, true);
  EXPECT_EQ(changes[2].keys.layers.remat_policy, "HIDDEN_STATE_WITH_OFFLOAD");
  EXPECT_TRUE(changes[2].keys.layers.scan_layers);
  // Settings that are already in effect are not suggested, and none is reverted.
  k = changes[2].keys;
  EXPECT_EQ(words(k, true, true), (Words{"attention=flash", "per_device_batch_size=1"}));
}

}  // namespace
}  // namespace md
