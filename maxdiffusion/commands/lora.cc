// `lora merge`, `lora extract`, `lora resize`, `lora convert` and `lora info`.
#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/convert/convert.h"
#include "maxdiffusion/convert/lora_tools.h"

namespace md {
namespace {

/// Keys of the files to merge.
struct MergeKeys : LoraKeys {
  template <class V>
  void visit(V&& v) {
    visit_files(v);
  }
};

void merge(const Words& words) {
  ConvertKeys keys;
  MergeKeys files;
  assign(words, 3, keys, files);
  convert(words[1], words[2], keys, files);
}

void extract(const Words& words) {
  ExtractKeys keys;
  assign(words, 4, keys);
  extract_lora(words[1], words[2], words[3], keys);
}

void resize(const Words& words) {
  ResizeKeys keys;
  assign(words, 3, keys);
  resize_lora(words[1], words[2], keys);
}

void convert_layout(const Words& words) {
  LoraLayoutKeys keys;
  assign(words, 4, keys);
  convert_lora(words[1], words[2], words[3], keys);
}

void info(const Words& words) {
  check(words.size() == 2, Code::invalid_config, "lora info: one file is expected");
  print_lora(words[1]);
}

struct Tool {
  const char* name;
  size_t paths;
  void (*run)(const Words&);
};
constexpr Tool kTools[] = {{"merge", 2, merge},
                           {"extract", 3, extract},
                           {"resize", 2, resize},
                           {"convert", 3, convert_layout},
                           {"info", 1, info}};

void lora(const Words& words) {
  for (const Tool& tool : kTools) {
    if (words.empty() || words[0] != tool.name) continue;
    check(words.size() > tool.paths, Code::invalid_config, "lora {}: {} needed", tool.name,
          tool.paths == 1 ? "one path is" : std::to_string(tool.paths) + " paths are");
    return tool.run(words);
  }
  fail(Code::invalid_config,
       "lora: expected merge MODEL OUT, extract MODEL TUNED OUT, resize FILE OUT, convert MODEL FILE "
       "OUT or info FILE");
}

void print_tools_keys(const KeyPrinter& print) {
  print_command_keys<ConvertKeys, MergeKeys>(print, "merge");
  print_command_keys<ExtractKeys>(print, "extract");
  print_command_keys<ResizeKeys>(print, "resize");
  print_command_keys<LoraLayoutKeys>(print, "convert");
}

}  // namespace

Command lora_command() {
  return {"lora",
          "merge MODEL OUT lora_files=FILE,… [key=value …] | extract MODEL TUNED OUT [rank=16] [key=value …] | "
          "resize FILE OUT rank=8 [explained_variance=0.9] | convert MODEL FILE OUT layout=kohya | info FILE",
          "merge LoRA files into a model, extract one from two models, reduce the rank of one, write one in another "
          "layout, or print one",
          lora, print_tools_keys};
}

}  // namespace md
