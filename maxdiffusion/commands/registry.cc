// The list of commands, and the lookup of their names. A new command is one file and one row here.
#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/families/reference_conventions.h"
#include "maxdiffusion/processes/launch.h"
#include "maxdiffusion/processes/processes.h"

// In the order of help.
#define COMMANDS(X)       \
  X(train)                \
  X(train_dreambooth)     \
  X(check)                \
  X(doctor)               \
  X(generate)             \
  X(generate_controlnet)  \
  X(upscale)              \
  X(serve)                \
  X(compile)              \
  X(plan)                 \
  X(convert)              \
  X(lora)                 \
  X(report)               \
  X(inspect)              \
  X(prepare_tfrecords)    \
  X(prepare_emoji)        \
  X(prepare_moving_emoji) \
  X(prune_cache)          \
  X(completion)           \
  X(accelerator_check)

namespace md {

#define DECLARE(name) Command name##_command();
COMMANDS(DECLARE)
#undef DECLARE

const std::vector<Command>& commands() {
#define ROW(name) name##_command(),
  static const std::vector<Command> all = {COMMANDS(ROW)};
#undef ROW
  return all;
}

namespace {

/// MaxDiffusion has one program per family ("train_" and its name); here they are one command, and the model folder
/// selects the family.
std::string without_family(const std::string& name) {
  for (const char* command : {"train", "generate", "generate_controlnet"})
    for (const std::string& family : reference_commands())
      if (name == std::string(command) + "_" + family) return command;
  for (const std::string& converter : reference_converters())
    if (name == converter) return "prepare_tfrecords";
  return name;
}

void print_help() {
  fmt::print("maxdiffusion {}\nusage: {} COMMAND …\n\n", version(), program_name());
  for (const Command& c : commands()) fmt::print("  {} {}\n      {}\n", c.name, c.arguments, c.meaning);
  fmt::print(
      "  help [COMMAND], COMMAND --help\n      print this, or a command's keys with their defaults and meanings\n"
      "  version\n      print the version\n\nkeys are given as key=value, --key=value or --key value\n");
}

void print_help(const Command& c) {
  fmt::print("usage: {} {} {}\n{}\n", program_name(), c.name, c.arguments, c.meaning);
  c.keys([](const char* title, const KeyList& keys) {
    fmt::print("\n{}:\n", title);
    for (const ConfigKey& key : keys.keys()) fmt::print("  {}\n", key.line());
  });
}

const Command& command_of(const std::string& word) {
  const std::string name = without_family(word);
  Words names = {"help", "version"};
  for (const Command& c : commands()) {
    if (name == c.name) return c;
    names.push_back(c.name);
  }
  Error error(Code::invalid_config, fmt::format("there is no command '{}'", word));
  if (std::string near = nearest(word, names); !near.empty()) error.note(fmt::format("did you mean '{}'?", near));
  throw error.note(fmt::format("try: {} help", program_name()));
}

/// Throws the error, in all processes of the job if they are not connected yet: the others would wait for this one.
[[noreturn]] void refuse_together(const Error& e) {
  if (launch_of_environment().count > 1 && processes().alone()) {
    try {
      join_processes();
    } catch (const Error&) {
      throw e;
    }
    throw_together(processes(), "start", e);
  }
  throw e;
}

bool asks_for_help(const std::string& word) { return word == "--help" || word == "-h"; }

}  // namespace

void run_command(const Words& words) {
  if (words.empty() || words == Words{"help"} || asks_for_help(words[0])) return print_help();
  const auto takes = [&](size_t most) {
    check(words.size() <= most, Code::invalid_config, "{}: found '{}' after it; expected nothing",
          fmt::join(words.begin(), words.begin() + static_cast<long>(most), " "), words.back());
  };
  if (words[0] == "help") {
    takes(2);
    if (words[1] == "help" || words[1] == "version") return print_help();  // these have no keys
    return print_help(command_of(words[1]));
  }
  if (words[0] == "version" || words[0] == "--version" || words[0] == "-v") {
    takes(1);
    return fmt::print("maxdiffusion {}\n", version());
  }
  const Command& c = command_of(words[0]);
  if (std::ranges::any_of(words, asks_for_help)) return print_help(c);
  const int64_t count = launch_of_environment().count;
  if (count > 1 && !c.joint)
    refuse_together(Error(Code::invalid_config, fmt::format("{} runs in one process; found {}", c.name, count))
                        .note("try: without the MPI launcher"));
  const bool as_reference = words[0] != c.name && c.as_reference;
  const auto run = [&] { (as_reference ? c.as_reference : c.run)(Words(words.begin() + 1, words.end())); };
  if (count == 1 || std::string_view(c.name) == "doctor") return run();
  try {
    run();
  } catch (const Interrupted&) {
    throw;
  } catch (const Error& e) {
    if (!processes().alone()) throw;
    refuse_together(e);
  }
}

}  // namespace md
