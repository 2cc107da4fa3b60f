// A command of the program: a file here that gives a Command, and a row of registry.cc.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "maxdiffusion/config/config.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

/// What follows the command's name.
using Words = std::vector<std::string>;

/// Prints a group of keys under its title.
using KeyPrinter = std::function<void(const char* title, const KeyList& keys)>;

struct Command {
  const char *name, *arguments, *meaning;  // as help prints them
  void (*run)(const Words&);
  void (*keys)(const KeyPrinter& print);         // prints its keys, a group after the other
  bool joint = false;                            // several processes may do it together
  void (*as_reference)(const Words&) = nullptr;  // under one of MaxDiffusion's names; null: as `run`
};

/// In the order of help.
const std::vector<Command>& commands();
/// Runs the command that words[0] names, in any of its names, or prints help. Throws invalid_config.
void run_command(const Words& words);

// --- For the files of commands --------------------------------------------------------------------------------------

/// Reads the words from the `first` on as key=value.
template <class... Keys>
void assign(const Words& words, size_t first, Keys&... configs) {
  KeyList keys;
  (keys.add(configs), ...);
  ConfigSource source =
      ConfigSource::from_text("", keys.overrides({words.begin() + static_cast<long>(first), words.end()}));
  source.rename(renamed_keys());
  keys.assign(source);
}
/// The config that a command's words name: a file, then key=value words.
RunConfig config_of(const char* command, const Words& words);

/// The title of a command's own keys, where it has one group of them.
inline constexpr const char* kOwnKeys = "keys";
/// Prints a command's own keys.
template <class... Keys>
void print_own_keys(const KeyPrinter& print, const char* title = kOwnKeys) {
  std::tuple<Keys...> configs;
  KeyList keys;
  std::apply([&](auto&... config) { (keys.add(config), ...); }, configs);
  print(title, keys);
}
/// Prints the groups of a config's keys (RunConfig::groups) that a command reads.
void print_config_keys(const KeyPrinter& print, std::initializer_list<std::string_view> titles);
/// All groups, as a command prints them that trains or looks at training.
void print_all_config_keys(const KeyPrinter& print);
/// What such a command is given.
inline constexpr const char* kConfigArguments = "CONFIG [key=value …]";

/// Prints docs/keys.md: every key of a config and of a command, and what other programs call them.
void print_key_reference();

}  // namespace md
