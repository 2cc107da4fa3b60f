// Commands of the program. Each is a file here that defines a Command, and a row of registry.cc.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

/// Command-line arguments after the command's name.
using Words = std::vector<std::string>;

/// Prints a group of keys under its title.
using KeyPrinter = std::function<void(const char* title, const KeyList& keys)>;

struct Command {
  const char *name, *arguments, *meaning;  // as help prints them
  void (*run)(const Words&);
  void (*keys)(const KeyPrinter& print);         // calls `print` for each group of its keys
  bool joint = false;                            // whether several processes may run it together
  void (*as_reference)(const Words&) = nullptr;  // under one of MaxDiffusion's names; null: as `run`
};

/// In the order of help.
const std::vector<Command>& commands();
/// Runs the command whose name, or another program's name for it, is words[0], or prints help. Throws invalid_config.
void run_command(const Words& words);

// --- For the files of commands --------------------------------------------------------------------------------------

/// Assigns words[first], words[first + 1], …, each key=value, to the keys of `configs`.
template <class... Keys>
void assign(const Words& words, size_t first, Keys&... configs) {
  KeyList keys;
  (keys.add(configs), ...);
  ConfigSource source =
      ConfigSource::from_text("", keys.overrides({words.begin() + static_cast<long>(first), words.end()}));
  source.rename(renamed_keys());
  keys.assign(source);
}
/// Separates the words that set one of `keys` (first; `--key value` is two words) from all others (second).
std::pair<Words, Words> split_words(const Words& words, const KeyList& keys);
/// Sets a command's keys, which may stand anywhere among the words; returns the other words.
template <class... Keys>
Words take_keys(const Words& words, Keys&... configs) {
  KeyList keys;
  (keys.add(configs), ...);
  auto [command_words, others] = split_words(words, keys);
  assign(command_words, 0, configs...);
  return others;
}
/// Loads the config from a command's words: a file, then key=value words.
RunConfig config_of(const char* command, const Words& words);
/// The config of key=value words without a file.
RunConfig config_of_keys(const Words& words);

/// Title of a command's own keys if they are one group.
inline constexpr const char* kCommandKeys = "keys";
/// Prints a command's own keys.
template <class... Keys>
void print_command_keys(const KeyPrinter& print, const char* title = kCommandKeys) {
  std::tuple<Keys...> configs;
  KeyList keys;
  std::apply([&](auto&... config) { (keys.add(config), ...); }, configs);
  print(title, keys);
}
/// Prints the groups of a config's keys (RunConfig::groups) that a command reads.
void print_config_keys(const KeyPrinter& print, std::initializer_list<std::string_view> titles);
/// Prints all groups, for commands that train or inspect training.
void print_all_config_keys(const KeyPrinter& print);
/// Usage of the arguments of commands that read a config.
inline constexpr const char* kConfigArguments = "CONFIG [key=value …]";

/// Prints docs/keys.md: every key of configs and commands, and its names in other programs.
void print_key_reference();

}  // namespace md
