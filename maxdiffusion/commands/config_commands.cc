// Commands whose words are a config and keys of it.
#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/compile_ahead.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/inspect.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/run/find_run.h"

namespace md {
namespace {

constexpr const char* kArguments = "CONFIG [key=value …]";

void print_all_keys(const KeyPrinter& print) {
  print_config_keys(print,
                    {"run", "devices", "model", "data", "training", "DreamBooth", "LoRA", "samples", "without effect"});
}
void print_generate_keys(const KeyPrinter& print) {
  print_config_keys(print, {"run", "devices", "model", "LoRA", "samples"});
}

/// Generates with a config; a run's folder stands for its own.
template <bool kControl, bool kAsReference>
void generate_of(const Words& words) {
  Words w = words;
  if (!w.empty()) w[0] = config_file(w[0]);
  generate(config_of(kControl ? "generate_controlnet" : "generate", w),
           {.with_control = kControl, .as_reference = kAsReference});
}

void train_one_subject(const Words& words) {
  const RunConfig c = config_of("train_dreambooth", words);
  check(!c.dreambooth.instance_data_dir.empty(), Code::invalid_config,
        "train_dreambooth: instance_data_dir is empty; expected the folder of the subject's images");
  train(c);
}

void inspect_stage(const Words& words) {
  if (words == Words{"keys", "--markdown"}) return print_key_reference();
  if (words == Words{"keys"}) {
    RunConfig defaults;
    KeyList keys;
    keys.add(defaults);
    for (const auto& k : keys.keys()) fmt::print("{}\n", k.line());
    return;
  }
  check(!words.empty(), Code::invalid_config,
        "inspect: what is missing; try: inspect keys, or: inspect config configs/quickstart.yml");
  const RunConfig c = config_of(("inspect " + words[0]).c_str(), Words(words.begin() + 1, words.end()));
  if (words[0] == "config") return fmt::print("{}", c.to_yaml());
  inspect(words[0], c);
}

}  // namespace

Command train_command() {
  return {"train",
          kArguments,
          "train a model as the config says; a run that exists resumes from its newest checkpoint",
          [](const Words& words) { train(config_of("train", words)); },
          print_all_keys,
          true};
}

Command train_dreambooth_command() {
  return {"train_dreambooth", kArguments,     "train one subject with images of its class (DreamBooth)",
          train_one_subject,  print_all_keys, true};
}

Command check_command() {
  return {"check", kArguments,
          "check everything that a training run needs up to its first step, and report what is wrong",
          [](const Words& words) { check_run(config_of("check", words)); }, print_all_keys};
}

Command generate_command() {
  return {"generate",
          "CONFIG|RUN [key=value …]",
          "generate images or videos with a model folder, or with what a run has trained",
          generate_of<false, false>,
          print_generate_keys,
          false,
          generate_of<false, true>};
}

Command generate_controlnet_command() {
  return {"generate_controlnet",    "CONFIG|RUN [key=value …]", "generate images with a model and a ControlNet",
          generate_of<true, false>, print_generate_keys,        false,
          generate_of<true, true>};
}

Command compile_command() {
  return {"compile", "CONFIG topology=v5p:2x2x1 | hardware=gpu topology=1x1x8 gpu=h100 [key=value …]",
          "compile the training step for TPUs or GPUs that are not attached, and report its memory and work",
          [](const Words& words) { compile_for_topology(config_of("compile", words)); }, print_all_keys};
}

Command plan_command() {
  return {
      "plan", "CONFIG [topology=v5p:2x2x1] [key=value …]",
      "report the memory and time of a training step on each device and, if it does not fit, what would make it fit",
      [](const Words& words) { plan(config_of("plan", words)); }, print_all_keys};
}

Command inspect_command() {
  return {"inspect", "keys [--markdown] | config|mesh|plan|params|batch|graph|program|memory CONFIG [key=value …]",
          "print every key with its default and meaning, or one stage of a run", inspect_stage, print_all_keys};
}

Command prepare_tfrecords_command() {
  return {"prepare_tfrecords", kArguments, "write the dataset of a config as TFRecord files, encoded or unencoded",
          [](const Words& words) {
            const RunConfig c = config_of("prepare_tfrecords", words);
            fmt::print("{} records in {}\n", prepare_tfrecords(c), c.tfrecords.tfrecords_dir);
          },
          [](const KeyPrinter& print) {
            print_config_keys(print, {"run", "devices", "model", "data"});
          }};
}

}  // namespace md
