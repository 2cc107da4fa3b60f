// What an optimizer's file ends with: its name, its keys, and how it is made from them.
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

/// `T` is an Optimizer made from `Keys`: a struct of doubles and bools with `visit`, as other keys have it.
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
