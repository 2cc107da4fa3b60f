#include "maxdiffusion/settings/memory_fit.h"

#include <gtest/gtest.h>

#include <map>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Words = std::vector<std::string>;

Words words(const std::vector<MemoryChange>& changes) {
  Words all;
  for (const MemoryChange& change : changes) all.push_back(words_of(change.settings));
  return all;
}

TEST(MemoryFit, ChangesGoFromTheCheapestToTheDearestAndLeaveTheUpdateAsItIs) {
  MemoryKeys keys;
  keys.batches.per_device_batch_size = 4;
  keys.accumulation = 2;
  const std::vector<MemoryChange> changes = memory_changes(keys, true, true, true);
  EXPECT_EQ(words(changes), (Words{"attention=flash", "gradient_accumulation_steps=4 per_device_batch_size=2",
                                   "gradient_accumulation_steps=8 per_device_batch_size=1", "base_weights_dtype=int8",
                                   "remat_policy=FULL scan_layers=true", "base_weights_dtype=nf4",
                                   "remat_policy=HIDDEN_STATE_WITH_OFFLOAD scan_layers=true"}));
  for (const MemoryChange& change : changes) {
    MemoryKeys changed = keys;
    change.apply(changed);
    EXPECT_EQ(changed.batches.per_device_batch_size * static_cast<double>(changed.accumulation), 8)
        << words_of(change.settings);
  }
  MemoryKeys all = keys;
  for (const MemoryChange& change : changes) change.apply(all);
  EXPECT_EQ(all.layers.base_weights_dtype, "nf4");
  EXPECT_EQ(all.layers.remat_policy, "HIDDEN_STATE_WITH_OFFLOAD");
  EXPECT_EQ(words(memory_changes(all, true, true, true)), Words());
  // Blocks are swapped last, half of them first.
  const std::vector<MemoryChange> swapped = memory_changes(all, true, true, true, 57);
  EXPECT_EQ(words(swapped), (Words{"blocks_to_swap=28 scan_layers=true", "blocks_to_swap=57 scan_layers=true"}));
  swapped.front().apply(all);
  EXPECT_EQ(words(memory_changes(all, true, true, true, 57)), (Words{"blocks_to_swap=57 scan_layers=true"}));
  EXPECT_EQ(words(memory_changes(all, true, false, true, 57)), Words{"optimizer=adamw8bit"});  // nothing is frozen
  // Trained weights are not quantized, and a CPU's memory is the host's.
  EXPECT_EQ(words(memory_changes({}, true, false, false)),
            (Words{"attention=flash", "optimizer=adamw8bit", "remat_policy=FULL scan_layers=true"}));
  // Without a backward pass nothing is saved for it and no gradients are accumulated.
  EXPECT_EQ(words(memory_changes(keys, false, true, true)),
            (Words{"attention=flash", "base_weights_dtype=int8", "base_weights_dtype=nf4"}));
}

/// Changes that each save a number of bytes, out of 100 in total.
struct Savings {
  std::vector<MemoryChange> changes;
  std::vector<int64_t> saved;
  void add(const char* key, int64_t bytes, double cost) {
    changes.push_back({{{key, std::to_string(changes.size())}}, cost, [](MemoryKeys&) {}});
    saved.push_back(bytes);
  }
  MemoryFit fit(int64_t limit) const {
    return fit_memory(changes, limit, [&](const std::vector<size_t>& set) -> MemoryNeed {
      std::map<std::string, int64_t> by_key;  // of each key the last change
      for (size_t i : set) {
        if (saved[i] < 0) return {};
        by_key[changes[i].settings.begin()->first] = saved[i];
      }
      int64_t bytes = 100;
      for (const auto& [key, saves] : by_key) bytes -= saves;
      return bytes > 95 ? kMoreThanADevice : bytes;
    });
  }
};

TEST(MemoryFit, KeepsWhatIsNeededAndTakesBackTheRest) {
  Savings s;
  s.add("a", 0, 0);      // free
  s.add("b", 10, 0.02);  // little
  s.add("c", -1, 0.08);  // refused
  s.add("d", 40, 0.3);
  s.add("e", 5, 0.35);
  EXPECT_EQ(s.fit(kMoreThanADevice).best->changes, std::vector<size_t>());
  EXPECT_EQ(s.fit(90).best->changes, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(s.fit(60).best->changes, (std::vector<size_t>{0, 3}));  // d alone is enough
  EXPECT_EQ(s.fit(50).best->changes, (std::vector<size_t>{0, 1, 3}));
  EXPECT_EQ(s.fit(45).best->changes, (std::vector<size_t>{0, 1, 3, 4}));
  const MemoryFit none = s.fit(44);
  EXPECT_FALSE(none.best);
  EXPECT_EQ(none.trials.back().need, 45);  // the smallest need found
  EXPECT_EQ(none.trials.size(), 6U);
}

TEST(MemoryFit, AChangeThatALaterOneReplacesIsNotNamed) {
  Savings s;
  s.add("batch", 10, 0.02);
  s.add("batch", 30, 0.03);
  EXPECT_EQ(s.fit(70).best->changes, (std::vector<size_t>{1}));
}

TEST(MemoryFit, AFasterValueOfAKeyComesBackIfLaterChangesSaveEnough) {
  Savings s;
  s.add("base", 20, 0.05);  // int8
  s.add("remat", 10, 0.3);
  s.add("base", 30, 0.1);  // nf4
  s.add("swap", 30, 0.5);
  EXPECT_EQ(s.fit(65).best->changes, (std::vector<size_t>{1, 2}));
  EXPECT_EQ(s.fit(50).best->changes, (std::vector<size_t>{0, 3}));
  EXPECT_EQ(s.fit(45).best->changes, (std::vector<size_t>{2, 3}));
}

TEST(MemoryFit, SizesHaveAUnit) {
  EXPECT_EQ(memory_size("fit", "24GB"), 24'000'000'000);
  EXPECT_EQ(memory_size("fit", "1.5GiB"), 1'610'612'736);
  EXPECT_EQ(memory_size("fit", "512 MB"), 512'000'000);
  for (const char* text : {"24", "GB", "-1GB", "24gb"}) EXPECT_THROW(memory_size("fit", text), Error) << text;
}

}  // namespace
}  // namespace md
