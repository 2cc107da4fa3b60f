// Search for a fast combination of key changes that makes a program fit a device's memory.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/settings/memory_suggestions.h"

namespace md {

/// A change of keys that saves memory and costs time. Later changes override earlier ones.
struct MemoryChange {
  std::map<std::string, std::string> settings;  // YAML values by key
  double cost = 0;                              // approximate relative increase of the step time: 0.05 is 5 % more
  std::function<void(MemoryKeys&)> apply;
};
/// "key=value key=value"
std::string words_of(const std::map<std::string, std::string>& settings);
/// The settings of several changes, applied in this order.
std::map<std::string, std::string> settings_of(const std::vector<MemoryChange>& changes,
                                               const std::vector<size_t>& which);

/// The changes that these keys do not have yet, cheapest first: flash attention; smaller batches, with accumulation to
/// the same number of samples per update; int8 base weights if `frozen` (LoRA training, sampling), else AdamW with
/// 8-bit moments; rematerialization; nf4 base weights; if `offloads`: block inputs offloaded to the host, and, if
/// `frozen`, half of `blocks` blocks swapped, then all. No change affects which samples an update uses.
std::vector<MemoryChange> memory_changes(const MemoryKeys& keys, bool trains, bool frozen, bool offloads,
                                         int64_t blocks = 0);

/// Bytes per device that a combination needs; none: the combination is not possible.
using MemoryNeed = std::optional<int64_t>;
/// A need that is larger than the compiler accepts.
inline constexpr int64_t kMoreThanADevice = std::numeric_limits<int64_t>::max();
struct MemoryTrial {
  std::vector<size_t> changes;  // indices, ascending
  MemoryNeed need;
};
struct MemoryFit {
  std::vector<MemoryTrial> trials;       // in the order of the attempts
  std::optional<MemoryTrial> best = {};  // none: nothing fits
};
/// Applies changes cumulatively until `need` is at most `limit` bytes, skipping impossible ones; then, most expensive
/// first, removes those that are not needed, or puts an earlier change of the same keys in their place.
MemoryFit fit_memory(const std::vector<MemoryChange>& changes, int64_t limit,
                     const std::function<MemoryNeed(const std::vector<size_t>&)>& need);

/// Bytes of a text such as 24GB, 8GiB, 512MB. Throws invalid_config, naming `key`.
int64_t memory_size(const std::string& key, const std::string& text);

}  // namespace md
