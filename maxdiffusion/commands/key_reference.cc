// `inspect keys --markdown`: prints docs/keys.md; a test compares the two.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/settings/foreign_keys.h"

namespace md {
namespace {

/// Text as a cell of a table.
std::string cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' || c == '*' ? std::string("\\") + c : std::string(1, c);
  return out;
}

/// The values that the key accepts: "a whole number, 0 or more", "one of: png, mp4".
std::string accepted_values(const ConfigKey& key) {
  if (key.words) return key.words->text();
  const std::string range = key.range ? key.range->text() : "";
  if (!range.empty()) return key.type + (key.type.find("list") == std::string::npos ? ", " : ", each ") + range;
  return key.path == KeyPath::none ? key.type : key.type == "text" ? "a path" : "a path or a list of paths";
}

void print_table(const KeyList& keys) {
  fmt::print("\n| key | default | takes | meaning |\n| --- | --- | --- | --- |\n");
  for (const ConfigKey& key : keys.keys())
    fmt::print("| `{}` | `{}` | {} | {} |\n", key.name, key.print(), cell(accepted_values(key)), cell(key.meaning));
}

std::string title_of(const Command& c, const std::string& group) {
  return group == kCommandKeys ? c.name : std::string(c.name) + " " + group;
}

}  // namespace

void print_key_reference() {
  fmt::print(
      "# Configuration keys\n\n"
      "Written by `./run inspect keys --markdown`; do not edit.\n\n"
      "A key stands in a config file, `key: value`, or on the command line after it: `key=value`, `--key=value` or\n"
      "`--key value`. What else a file may hold, and to what paths are relative: [train](train.md#commands). The keys\n"
      "of one command are printed by `./run help COMMAND`. Where a key is read and which test proves it:\n"
      "[for developers](dev/keys.md).\n");
  RunConfig defaults;
  std::set<std::string> groups;
  defaults.groups([&](const char* title, auto&... structs) {
    std::vector<std::string> readers;
    for (const Command& c : commands())
      c.keys([&](const char* group, const KeyList&) {
        if (std::string(group) == title) readers.emplace_back(c.name);
      });
    KeyList keys;
    (keys.add(structs), ...);
    groups.insert(title);
    fmt::print("\n## Group: {}\n\nRead by `{}`.\n", title, fmt::join(readers, "`, `"));
    print_table(keys);
  });
  for (const Command& c : commands())
    c.keys([&](const char* group, const KeyList& keys) {
      if (groups.contains(group)) return;
      fmt::print("\n## Command: {}\n", title_of(c, group));
      print_table(keys);
    });
  fmt::print(
      "\n## Arguments of optimizers\n\n"
      "`optimizer_args` sets them, `NAME=VALUE` each, with the names and defaults of the packages.\n\n"
      "| optimizer | argument | default | meaning |\n| --- | --- | --- | --- |\n");
  for (const std::string& optimizer : optimizer_names())
    for (const OptimizerArgument& a : optimizer_arguments(optimizer))
      fmt::print("| `{}` | `{}` | `{}` | {} |\n", optimizer, a.name, to_string(a.value), cell(a.meaning));
  fmt::print(
      "\n## Names in other programs\n\n"
      "A name of the left column is refused, with the right one in the message. Flags and classes side by side:\n"
      "[coming from](coming_from.md).\n\n| elsewhere | |\n| --- | --- |\n");
  for (const auto& [theirs, ours] : foreign_keys()) fmt::print("| `{}` | {} |\n", theirs, cell(ours));
}

}  // namespace md
