// The registry entry of an optimizer: name, keys, constructor.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "maxdiffusion/optim/optimizer.h"

namespace md {

struct OptimizerEntry {
  const char* name;
  std::vector<OptimizerKey> keys;  // with their defaults
  std::unique_ptr<Optimizer> (*make)(OptimConfig);
};

/// `T`: an Optimizer constructed from `Keys`, a struct of doubles and bools with `visit`.
template <class T, class Keys>
OptimizerEntry optimizer_entry(const char* name) {
  OptimizerEntry entry{
      name, {}, [](OptimConfig c) -> std::unique_ptr<Optimizer> {
        Keys keys;
        keys.visit([&](const char* key, auto& value, auto&&...) { value = c.own<std::decay_t<decltype(value)>>(key); });
        return std::make_unique<T>(keys);
      }};
  Keys keys;
  keys.visit([&](const char* key, auto value, const char* meaning, auto... range) {
    entry.keys.push_back({name, key, value, meaning, range...});
  });
  return entry;
}

}  // namespace md
