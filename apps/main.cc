// The command: finds the subcommand, hands it the remaining words, and is the one place where errors are caught.
// A subcommand is one function and one line of kCommands.
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <vector>

#include "maxdiffusion/base/address_space.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/exit_status.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/version.h"
#include "maxdiffusion/commands/compile_ahead.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/config/config.h"
#include "maxdiffusion/convert/convert.h"
#include "maxdiffusion/convert/lora_tools.h"
#include "maxdiffusion/data/demo/emoji.h"
#include "maxdiffusion/data/demo/moving_emoji.h"
#include "maxdiffusion/processes/launch.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/run/find_run.h"
#include "maxdiffusion/run/plan.h"
#include "maxdiffusion/storage/storage.h"

namespace {

using Words = std::vector<std::string>;

/// Reads the words from the `first` on as key=value.
template <class... Keys>
void assign(const Words& words, size_t first, Keys&... configs) {
  md::KeyList keys;
  (keys.add(configs), ...);
  const Words given(words.begin() + static_cast<long>(first), words.end());
  keys.assign(md::ConfigSource::from_text("", keys.overrides(given)));
}

/// The keys of prepare_emoji and prepare_moving_emoji.
struct EmojiKeys : md::EmojiConfig {
  template <class V>
  void visit(V&& v) {
    v("font", font, "the colour emoji font", md::KeyPath::input);
    v("names", names, "Unicode's emoji-test.txt", md::KeyPath::input);
    v("resolution", resolution, "pixels per side");
  }
};
struct ClipKeys {
  md::MovingEmojiConfig config;
  template <class V>
  void visit(V&& v) {
    v("num_frames", config.num_frames, "frames of each clip");
    v("fps", config.fps, "frames per second");
  }
};

/// The folder that a command's words begin with.
std::string folder_of(const char* command, const Words& words) {
  md::check(!words.empty(), md::Code::invalid_config, "{}: the folder to write to is missing", command);
  md::check(!words[0].starts_with('-'), md::Code::invalid_config,
            "{}: expected the folder to write to before keys, found '{}'", command, words[0]);
  return words[0];
}

void prepare_emoji(const Words& words) {
  const std::string folder = folder_of("prepare_emoji", words);
  EmojiKeys config;
  assign(words, 1, config);
  int64_t count = md::prepare_emoji(folder, config);
  fmt::print("{} pictures in {}\n", count, words[0]);
}

void prepare_moving_emoji(const Words& words) {
  const std::string folder = folder_of("prepare_moving_emoji", words);
  EmojiKeys emoji;
  ClipKeys clips;
  emoji.resolution = clips.config.emoji.resolution;
  assign(words, 1, emoji, clips);
  clips.config.emoji = emoji;
  const int64_t count = md::prepare_moving_emoji(folder, clips.config);
  fmt::print("{} clips in {}\n", count, words[0]);
}

/// The config that a command's words name: a file, then key=value words.
md::RunConfig config_of(const char* command, const Words& words) {
  md::check(!words.empty(), md::Code::invalid_config,
            "{}: the config file is missing; try: {} configs/quickstart.yml key=value …", command, command);
  if (words[0].starts_with('-') || words[0].find('=') != std::string::npos) {
    const auto file = std::ranges::find_if(words, [](const std::string& word) { return word.ends_with(".yml"); });
    throw md::Error(md::Code::invalid_config,
                    fmt::format("{}: expected the config file before keys, found '{}'", command, words[0]))
        .note(
            fmt::format("try: {} {} {} …", command, file == words.end() ? "configs/quickstart.yml" : *file, words[0]));
  }
  return md::RunConfig::load(words[0], Words(words.begin() + 1, words.end()));
}

void train(const Words& words) { md::train(config_of("train", words)); }

void train_dreambooth(const Words& words) {
  const md::RunConfig c = config_of("train_dreambooth", words);
  md::check(c.is_dreambooth(), md::Code::invalid_config,
            "train_dreambooth: instance_data_dir is empty; it names the subject's pictures");
  md::train(c);
}

void check_run(const Words& words) { md::check_run(config_of("check", words)); }

/// A config to sample with: a run's folder stands for its own.
md::RunConfig config_to_sample(const char* command, Words words) {
  if (!words.empty()) words[0] = md::config_file(words[0]);
  return config_of(command, words);
}

void generate(const Words& words) { md::generate(config_to_sample("generate", words)); }

void generate_controlnet(const Words& words) {
  md::generate(config_to_sample("generate_controlnet", words), {.with_control = true});
}

void generate_as_reference(const Words& words) {
  md::generate(config_to_sample("generate", words), {.as_reference = true});
}

void generate_controlnet_as_reference(const Words& words) {
  md::generate(config_to_sample("generate_controlnet", words), {.with_control = true, .as_reference = true});
}

void prepare_tfrecords(const Words& words) {
  const md::RunConfig c = config_of("prepare_tfrecords", words);
  fmt::print("{} records in {}\n", md::prepare_tfrecords(c), c.tfrecords.tfrecords_dir);
}

void convert(const Words& words) {
  md::check(words.size() >= 2, md::Code::invalid_config,
            "convert: two paths are needed; try: convert FOLDER FILE.safetensors");
  md::ConvertKeys config;
  assign(words, 2, config);
  md::convert(words[0], words[1], config);
}

void lora(const Words& words) {
  constexpr std::pair<const char*, size_t> kTools[] = {{"merge", 2}, {"extract", 3}, {"resize", 2}, {"info", 1}};
  const auto tool = std::ranges::find_if(kTools, [&](auto& t) { return !words.empty() && words[0] == t.first; });
  md::check(tool != std::end(kTools), md::Code::invalid_config,
            "lora: say what: merge MODEL OUT, extract MODEL TUNED OUT, resize FILE OUT or info FILE");
  const size_t paths = tool->second;
  md::check(words.size() > paths, md::Code::invalid_config, "lora {}: {} needed", words[0],
            paths == 1 ? "one path is" : std::to_string(paths) + " paths are");
  if (words[0] == "merge") {
    md::ConvertKeys config;
    md::LoraKeys files;
    assign(words, 3, config, files);
    md::convert(words[1], words[2], config, files);
  } else if (words[0] == "extract") {
    md::ExtractKeys config;
    assign(words, 4, config);
    md::extract_lora(words[1], words[2], words[3], config);
  } else if (words[0] == "resize") {
    md::ResizeKeys config;
    assign(words, 3, config);
    md::resize_lora(words[1], words[2], config);
  } else {
    md::check(words.size() == 2, md::Code::invalid_config, "lora info: one file is expected");
    md::print_lora(words[1]);
  }
}
void compile(const Words& words) { md::compile_for_topology(config_of("compile", words)); }

void plan(const Words& words) { md::plan(config_of("plan", words)); }

void inspect(const Words& words) {
  if (words == Words{"keys"}) {
    md::RunConfig defaults;
    md::KeyList keys;
    keys.add(defaults);
    for (const auto& k : keys.keys()) fmt::print("{}\n", k.line());
    return;
  }
  md::check(!words.empty(), md::Code::invalid_config,
            "inspect: say what; try: inspect keys, or: inspect config configs/quickstart.yml");
  const md::RunConfig c = config_of(("inspect " + words[0]).c_str(), Words(words.begin() + 1, words.end()));
  if (words[0] == "config") return fmt::print("{}", c.to_yaml());
  md::inspect(words[0], c);
}

void print_keys(const char* title, const md::KeyList& keys) {
  fmt::print("\n{}:\n", title);
  for (const auto& k : keys.keys()) fmt::print("  {}\n", k.line());
}

/// Prints a command's own keys.
template <class... Keys>
void own_keys(const char* title = "keys") {
  std::tuple<Keys...> configs;
  md::KeyList keys;
  std::apply([&](auto&... config) { (keys.add(config), ...); }, configs);
  print_keys(title, keys);
}

/// Prints the groups of a config's keys that a command reads.
void config_keys(std::initializer_list<std::string_view> titles) {
  md::RunConfig defaults;
  defaults.groups([&](const char* title, auto&... structs) {
    if (std::ranges::find(titles, title) == titles.end()) return;
    md::KeyList keys;
    (keys.add(structs), ...);
    print_keys(title, keys);
  });
}

void all_keys() {
  config_keys({"run", "devices", "model", "data", "training", "DreamBooth", "LoRA", "samples", "without effect"});
}
void generate_keys() { config_keys({"run", "devices", "model", "LoRA", "samples"}); }
void record_keys() { config_keys({"run", "devices", "model", "data"}); }
void lora_keys() {
  own_keys<md::ConvertKeys, md::LoraKeys>("merge");
  own_keys<md::ExtractKeys>("extract");
  own_keys<md::ResizeKeys>("resize");
}

struct Command {
  const char *name, *arguments, *meaning;
  void (*run)(const Words&);
  void (*keys)();                                // prints them
  bool joint = false;                            // several processes may do it together
  void (*as_reference)(const Words&) = nullptr;  // under one of the reference's names; null: as `run`
};

constexpr Command kCommands[] = {
    {"train", "CONFIG [key=value …]", "train as the config file says, from where its run stands", train, all_keys,
     true},
    {"train_dreambooth", "CONFIG [key=value …]", "train one subject beside pictures of its class (DreamBooth)",
     train_dreambooth, all_keys, true},
    {"check", "CONFIG [key=value …]",
     "look at all that a training run needs up to its first step, and say what is wrong", check_run, all_keys},
    {"generate", "CONFIG|RUN [key=value …]", "draw pictures with a model folder, or with what a run has trained",
     generate, generate_keys, false, generate_as_reference},
    {"generate_controlnet", "CONFIG|RUN [key=value …]", "draw pictures with a ControlNet beside the model",
     generate_controlnet, generate_keys, false, generate_controlnet_as_reference},
    {"compile", "CONFIG topology=v5p:2x2x1 | hardware=gpu topology=1x1x8 gpu=h100 [key=value …]",
     "compile the training step for TPUs or GPUs that are not here, and say what it would take there", compile,
     all_keys},
    {"plan", "CONFIG [topology=v5p:2x2x1] [key=value …]",
     "say what a training step takes on each device and, where that is too much, what would make it fit", plan,
     all_keys},
    {"convert", "IN OUT [format=diffusers|single_file] [dtype=float16] [component=NAME] [ema=false] [key=value …]",
     "write a model in the other layout: a folder as diffusers has it, or a single file", convert,
     [] { own_keys<md::ConvertKeys>(); }},
    {"lora",
     "merge MODEL OUT lora_files=FILE,… [key=value …] | extract MODEL TUNED OUT [rank=16] [key=value …] | "
     "resize FILE OUT rank=8 [energy=0.9] | info FILE",
     "put LoRA files into a model, take one out of two models, make one thinner, look at one", lora, lora_keys},
    {"inspect", "keys | config|mesh|params|batch|graph|program|memory CONFIG [key=value …]",
     "print every key with its default and meaning, or the value of one stage of a run", inspect, all_keys},
    {"prepare_tfrecords", "CONFIG [key=value …]", "write the data of a config as TFRecord files, encoded or as it is",
     prepare_tfrecords, record_keys},
    {"prepare_emoji", "FOLDER [resolution=64]", "write the colour emoji font as captioned pictures", prepare_emoji,
     [] { own_keys<EmojiKeys>(); }},
    {"prepare_moving_emoji", "FOLDER [resolution=64] [num_frames=17] [fps=8]",
     "write short clips of emoji that move, with captions that say how", prepare_moving_emoji,
     [] { own_keys<EmojiKeys, ClipKeys>(); }},
};

/// The reference has programs of each family ("train_" and its name), which are one here: the model folder differs.
std::string without_family(const std::string& name) {
  for (const char* command : {"train", "generate", "generate_controlnet"})
    for (const std::string& family : md::reference_commands())
      if (name == std::string(command) + "_" + family) return command;
  for (const std::string& converter : md::reference_converters())
    if (name == converter) return "prepare_tfrecords";
  return name;
}

void print_help() {
  fmt::print("maxdiffusion {}\nusage: maxdiffusion COMMAND …\n\n", md::version());
  for (const auto& c : kCommands) fmt::print("  {} {}\n      {}\n", c.name, c.arguments, c.meaning);
  fmt::print(
      "  help [COMMAND], COMMAND --help\n      print this, or a command's keys with their defaults and meanings\n"
      "  version\n      print the version\n\nkeys are given as key=value, --key=value or --key value\n");
}

void print_help(const Command& c) {
  fmt::print("usage: maxdiffusion {} {}\n{}\n", c.name, c.arguments, c.meaning);
  c.keys();
}

const Command& command_of(const std::string& word) {
  const std::string name = without_family(word);
  Words names = {"help", "version"};
  for (const auto& c : kCommands) {
    if (name == c.name) return c;
    names.push_back(c.name);
  }
  md::Error error(md::Code::invalid_config, fmt::format("there is no command '{}'", word));
  if (std::string near = md::nearest(word, names); !near.empty()) error.note(fmt::format("did you mean '{}'?", near));
  throw error.note("try: maxdiffusion help");
}

bool asks_for_help(const std::string& word) { return word == "--help" || word == "-h"; }

void dispatch(const Words& words) {
  if (words.empty() || words == Words{"help"} || asks_for_help(words[0])) return print_help();
  if (words[0] == "help") return print_help(command_of(words[1]));
  if (words[0] == "version" || words[0] == "--version" || words[0] == "-v")
    return fmt::print("maxdiffusion {}\n", md::version());
  const Command& c = command_of(words[0]);
  if (std::ranges::any_of(words, asks_for_help)) return print_help(c);
  if (const int64_t count = md::launch_of_environment().count; count > 1 && !c.joint)
    throw md::Error(md::Code::invalid_config, fmt::format("{} is done by one process, not by {}", c.name, count))
        .note("try: without the MPI launcher");
  const bool as_reference = words[0] != c.name && c.as_reference;
  (as_reference ? c.as_reference : c.run)(Words(words.begin() + 1, words.end()));
}

/// That what was printed could not be written.
md::Error output_error(int error) {
  return {md::Code::io, fmt::format("standard output cannot be written: {}", std::strerror(error))};
}

/// Prints one message with its notes; returns the exit status.
int report(const md::Error& e) {
  fmt::print(stderr, "{}error: {}\n", md::log_prefix(), e.message());
  for (const auto& note : e.notes()) fmt::print(stderr, "  {}\n", note);
  if (e.code() == md::Code::internal) {
    fmt::print(stderr, "  this is a defect of the program\n");
  }
  return md::exit_status(e.code());
}

/// However the program ends, the other processes of its job are told.
struct Leave {
  ~Leave() { md::leave_processes(false); }
};

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_DFL);  // `maxdiffusion inspect … | head` ends quietly
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of `ulimit -f` is an error that says so
  md::handle_interrupts();
  md::explain_crashes_under_a_limit();
  const md::RemoteScope remote;
  const Leave leave;
  try {
    dispatch(Words(argv + 1, argv + argc));
    if (std::fflush(stdout) != 0) throw output_error(errno);
    md::leave_processes(true);
    return 0;
  } catch (const md::Interrupted& e) {
    if (md::processes().leads()) fmt::print(stderr, "{}\n", e.what());
    md::leave_processes(true);
    return 128 + md::interrupt_signal();
  } catch (const md::Error& e) {
    return report(e);
  } catch (const std::bad_alloc&) {
    return report({md::Code::out_of_memory, "the host's memory is used up"});
  } catch (const std::system_error& e) {  // of fmt::print; or a thread, where there is no room for its stack
    if (std::ferror(stdout)) return report(output_error(e.code().value()));
    if (e.code() != std::errc::resource_unavailable_try_again) return report({md::Code::internal, e.what()});
    return report(md::Error(md::Code::out_of_memory, "no thread could be started")
                      .note("try: a larger limit on address space (ulimit -v) or on processes (ulimit -u)"));
  } catch (const std::exception& e) {
    return report({md::Code::internal, e.what()});
  } catch (...) {  // of a plugin, whose standard library is another: seen where it gets no memory
    return report({md::Code::out_of_memory, "a plugin has thrown an exception of its own, as where memory is used up"});
  }
}
