#include "maxdiffusion/commands/command.h"

#include <fmt/format.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/model_words.h"

namespace md {
namespace {

/// `name`, or if it does not exist the installed file of that name (configs/…).
std::string file_or_shipped(const std::string& name) {
  if (exists(name) || name.starts_with('/')) return name;
  std::string shipped = shipped_file(name);
  if (shipped.empty()) return name;
  log_info("config: {} is {}, installed with the program", name, shipped);
  return shipped;
}

}  // namespace

std::pair<Words, Words> split_words(const Words& words, const KeyList& keys) {
  std::pair<Words, Words> out;
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t start = words[i].starts_with("--") ? 2 : 0;
    std::string name = words[i].substr(start, words[i].find('=') - start);
    std::ranges::replace(name, '-', '_');
    const auto key = std::ranges::find(keys.keys(), name, &ConfigKey::name);
    const bool assigned = words[i].find('=') != std::string::npos;
    if (key == keys.keys().end() || (start == 0 && !assigned)) {
      out.second.push_back(words[i]);
      continue;
    }
    out.first.push_back(words[i]);
    const bool is_switch = key->type.starts_with("true");
    if (!assigned && !is_switch && i + 1 < words.size()) out.first.push_back(words[++i]);
  }
  return out;
}

RunConfig config_of(const char* command, const Words& words) {
  check(!words.empty(), Code::invalid_config,
        "{}: the config file is missing; try: {} {} configs/quickstart.yml key=value …", command, program_name(),
        command);
  if (words[0].starts_with('-') || words[0].find('=') != std::string::npos) {
    const auto file = std::ranges::find_if(words, [](const std::string& word) { return word.ends_with(".yml"); });
    throw Error(Code::invalid_config,
                fmt::format("{}: expected the config file before keys, found '{}'", command, words[0]))
        .note(fmt::format("try: {} {} {} {} …", program_name(), command,
                          file == words.end() ? "configs/quickstart.yml" : *file, words[0]));
  }
  if (exists(words[0]) && names_model(words[0]))
    throw Error(Code::invalid_config, fmt::format("{}: '{}' is a model; expected a config file", command, words[0]))
        .note(fmt::format(
            "try: {} {} CONFIG.yml pretrained_model_name_or_path={}, with a file of configs/ for its family",
            program_name(), command, words[0]));
  return RunConfig::load(file_or_shipped(words[0]), Words(words.begin() + 1, words.end()));
}

RunConfig config_of_keys(const Words& words) { return RunConfig::load("", words); }

void print_config_keys(const KeyPrinter& print, std::initializer_list<std::string_view> titles) {
  RunConfig defaults;
  defaults.groups([&](const char* title, auto&... structs) {
    if (std::ranges::find(titles, title) == titles.end()) return;
    KeyList keys;
    (keys.add(structs), ...);
    print(title, keys);
  });
}

void print_all_config_keys(const KeyPrinter& print) {
  print_config_keys(print, {"run", "devices", "model", "data", "training", "DreamBooth", "textual inversion", "LoRA",
                            "samples", "without effect"});
}

}  // namespace md
