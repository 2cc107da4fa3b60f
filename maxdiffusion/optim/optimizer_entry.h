// The registry entry of an optimizer: name, keys, arguments, constructor.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "maxdiffusion/optim/optimizer.h"

namespace md {

struct OptimizerEntry {
  const char* name;
  std::vector<OptimizerKey> keys;  // with their defaults
  std::vector<OptimizerArgument> arguments;
  std::function<std::unique_ptr<Optimizer>(OptimConfig)> make;
};

/// Assigns `words`, NAME=VALUE each, to the arguments. Throws invalid_config for unknown names and invalid values.
std::vector<OptimizerArgument> assigned(std::vector<OptimizerArgument> arguments, const std::vector<std::string>& words,
                                        const std::string& optimizer);
/// The keys of an optimizer as arguments: adam_b1 and adam_b2 are betas, adam_eps is eps.
std::vector<OptimizerArgument> arguments_of_keys(const std::vector<OptimizerKey>& keys);
/// Sets the keys that correspond to these arguments.
void set_keys(OptimConfig& config, const std::vector<OptimizerKey>& keys,
              const std::vector<OptimizerArgument>& arguments);
/// "lion_pytorch.lion_pytorch.Lion(betas=(0.9, 0.99),weight_decay=0)".
std::string called(const std::string& class_name, const std::vector<OptimizerArgument>& arguments);

/// `T`: an Optimizer constructed from `Keys`, a struct of doubles and bools with `visit`.
template <class T, class Keys>
OptimizerEntry optimizer_entry(const char* name) {
  std::vector<OptimizerKey> list;
  Keys defaults;
  defaults.visit([&](const char* key, auto value, const char* meaning, auto... range) {
    list.push_back({name, key, value, meaning, range...});
  });
  const std::vector<OptimizerArgument> arguments = arguments_of_keys(list);
  return {name, list, arguments, [=](OptimConfig c) -> std::unique_ptr<Optimizer> {
            if (!c.optimizer_args.empty()) set_keys(c, list, assigned(arguments, c.optimizer_args, name));
            Keys keys;
            keys.visit([&](const char* key, auto& value, auto&&...) {
              value = c.optimizer_arg<std::decay_t<decltype(value)>>(key);
            });
            return std::make_unique<T>(keys);
          }};
}

/// The members of `Args`, a struct with `visit`, as arguments: v(NAME, member, meaning, range or words). The range
/// applies to each number.
template <class Args>
std::vector<OptimizerArgument> as_arguments(Args args) {
  std::vector<OptimizerArgument> list;
  args.visit([&](const char* name, auto& value, const char* meaning, auto... takes) {
    OptimizerArgument a{name, value, meaning};
    [[maybe_unused]] auto take = [&](const auto& what) {
      if constexpr (std::is_same_v<std::decay_t<decltype(what)>, KeyRange>)
        a.range = what;
      else
        a.words = what;
    };
    (take(takes), ...);
    list.push_back(std::move(a));
  });
  return list;
}

/// `T`: an Optimizer constructed from `Args`, whose members only optimizer_args can set.
template <class T, class Args>
OptimizerEntry optimizer_with_arguments(const char* name) {
  return {name, {}, as_arguments(Args()), [name](const OptimConfig& c) -> std::unique_ptr<Optimizer> {
            const std::vector<OptimizerArgument> arguments = assigned(as_arguments(Args()), c.optimizer_args, name);
            Args args;
            size_t i = 0;
            args.visit([&](const char*, auto& value, auto&&...) {
              value = std::get<std::decay_t<decltype(value)>>(arguments[i++].value);
            });
            return std::make_unique<T>(args);
          }};
}

}  // namespace md
