#include "maxdiffusion/settings/memory_fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <regex>

#include "maxdiffusion/base/error.h"

namespace md {

std::string words_of(const std::map<std::string, std::string>& settings) {
  std::string all;
  for (const auto& [key, value] : settings) all += fmt::format("{}{}={}", all.empty() ? "" : " ", key, value);
  return all;
}

std::map<std::string, std::string> settings_of(const std::vector<MemoryChange>& changes,
                                               const std::vector<size_t>& which) {
  std::map<std::string, std::string> all;
  for (size_t i : which)
    for (const auto& [key, value] : changes[i].settings) all[key] = value;
  return all;
}

std::vector<MemoryChange> memory_changes(const MemoryKeys& keys, bool trains, bool frozen, bool offloads,
                                         int64_t blocks) {
  std::vector<MemoryChange> all;
  if (keys.layers.attention == "dot_product")
    all.push_back({{{"attention", "flash"}}, 0, [](MemoryKeys& k) { k.layers.attention = "flash"; }});
  // Products with fewer rows use a device less well; each halving costs slightly more than the previous one.
  double cost = 0.02;
  const double whole = keys.batches.per_device_batch_size;
  for (double batch = whole / 2;
       trains && keys.batches.global_batch_size <= 0 && batch >= 1 && batch == std::floor(batch);
       batch /= 2, cost *= 1.5) {
    const int64_t accumulation = keys.accumulation * std::llround(whole / batch);
    all.push_back({{{"per_device_batch_size", fmt::format("{:g}", batch)},
                    {"gradient_accumulation_steps", fmt::format("{}", accumulation)}},
                   cost,
                   [=](MemoryKeys& k) {
                     k.batches.per_device_batch_size = batch;
                     k.accumulation = accumulation;
                   }});
  }
  const auto base = [&](const char* type, double slower) {
    all.push_back(
        {{{"base_weights_dtype", type}}, slower, [type](MemoryKeys& k) { k.layers.base_weights_dtype = type; }});
  };
  const std::string& stored = keys.layers.base_weights_dtype;
  const bool quantizes = frozen && !keys.layers.quantization.use_qwix_quantization;
  // FLUX.1's LoRA step on an H200 became 5 and 3 % slower, nf4's on a CPU 14 % (docs/performance.md).
  if (quantizes && stored.empty()) base("int8", 0.05);
  // 8-bit moments; LoRA's moments are small anyway.
  if (trains && !frozen && keys.optimizer == "adamw")
    all.push_back({{{"optimizer", "adamw8bit"}}, 0.1, [](MemoryKeys& k) { k.optimizer = "adamw8bit"; }});
  constexpr const char* kOffload = "HIDDEN_STATE_WITH_OFFLOAD";
  const bool offloaded = keys.layers.remat_policy == kOffload && keys.layers.scan_layers;
  // One more forward pass, with a step taking about three.
  if (trains && keys.layers.remat_policy != "FULL" && !offloaded)
    all.push_back({{{"remat_policy", "FULL"}, {"scan_layers", "true"}}, 0.33, [](MemoryKeys& k) {
                     k.layers.remat_policy = "FULL";
                     k.layers.scan_layers = true;
                   }});
  if (quantizes && stored != "nf4") base("nf4", 0.1);
  if (trains && offloads && !offloaded)
    all.push_back({{{"remat_policy", kOffload}, {"scan_layers", "true"}}, 0.4, [](MemoryKeys& k) {
                     k.layers.remat_policy = kOffload;
                     k.layers.scan_layers = true;
                   }});
  // A step copies each swapped block once, and once more on the way back. With all of FLUX.1's swapped, a step took 1.5
  // times as long on an H200 with an nf4 base, 2.9 times with one of bfloat16.
  const auto swap = [&](int64_t n, double slower) {
    if (frozen && offloads && keys.layers.blocks_to_swap < n)
      all.push_back({{{"blocks_to_swap", std::to_string(n)}, {"scan_layers", "true"}}, slower, [n](MemoryKeys& k) {
                       k.layers.blocks_to_swap = n;
                       k.layers.scan_layers = true;
                     }});
  };
  swap(blocks / 2, 0.5);
  swap(blocks, 1);
  return all;
}

MemoryFit fit_memory(const std::vector<MemoryChange>& changes, int64_t limit,
                     const std::function<MemoryNeed(const std::vector<size_t>&)>& need) {
  MemoryFit fit;
  const auto fits = [&](const std::vector<size_t>& set) {
    fit.trials.push_back({set, need(set)});
    return fit.trials.back().need.value_or(kMoreThanADevice) <= limit;
  };
  std::vector<size_t> made;
  bool done = fits(made);
  for (size_t i = 0; i < changes.size() && !done; ++i) {
    made.push_back(i);
    done = fits(made);
    if (!fit.trials.back().need) made.pop_back();
  }
  if (!done) return fit;
  MemoryTrial best = fit.trials.back();
  const auto replaces = [&](size_t later, size_t i) {
    return later > i && std::ranges::all_of(changes[i].settings,
                                            [&](const auto& s) { return changes[later].settings.contains(s.first); });
  };
  // Changes whose settings a later change overrides have no effect.
  std::erase_if(best.changes,
                [&](size_t i) { return std::ranges::any_of(made, [&](size_t later) { return replaces(later, i); }); });
  // The last change was needed; changes without cost are kept.
  std::vector<size_t> others = best.changes;
  if (!others.empty()) others.pop_back();
  std::erase_if(others, [&](size_t i) { return changes[i].cost == 0; });
  std::ranges::stable_sort(others, [&](size_t a, size_t b) { return changes[a].cost > changes[b].cost; });
  for (size_t i : others) {
    std::vector<size_t> without = best.changes;
    std::erase(without, i);
    std::vector<std::vector<size_t>> faster = {without};
    for (size_t instead : made)
      if (replaces(i, instead)) {
        faster.push_back(without);
        faster.back().insert(std::ranges::upper_bound(faster.back(), instead), instead);
      }
    if (std::ranges::any_of(faster, fits)) best = fit.trials.back();
  }
  fit.best = best;
  return fit;
}

int64_t memory_size(const std::string& key, const std::string& text) {
  static const std::regex form("([0-9]+(?:\\.[0-9]+)?) ?([KMGT])(i?)B");
  std::smatch parts;
  check(std::regex_match(text, parts, form), Code::invalid_config,
        "{} is '{}'; expected a size such as 24GB or 22.5GiB", key, text);
  const double unit = parts[3].length() ? 1024 : 1000;
  const auto power = static_cast<double>(std::string("KMGT").find(parts[2].str()) + 1);
  return std::llround(std::stod(parts[1].str()) * std::pow(unit, power));
}

}  // namespace md
