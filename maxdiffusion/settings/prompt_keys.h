// Keys that produce prompts: alternatives and wildcards, a file of prompts, LoRA tags.
#pragma once

#include <string>

#include "maxdiffusion/base/key_path.h"

namespace md {

struct PromptKeys {
  bool dynamic_prompts = false;
  std::string wildcards_dir, prompt_file, lora_dir, xy;
  template <class V>
  void visit(V&& v) {
    v("dynamic_prompts", dynamic_prompts,
      "in prompts, {a|b} is one of its alternatives and __name__ a line of wildcards_dir/name.txt, chosen by the seed "
      "and number of each image; false: they are text");
    v("wildcards_dir", wildcards_dir, "folder of the text files that __name__ in dynamic_prompts names",
      KeyPath::input);
    v("prompt_file", prompt_file,
      "text file with a prompt on each line, or options as AUTOMATIC1111's script takes them (--prompt \"…\" --seed 7 "
      "--steps 20), each of which is generated; empty: prompt",
      KeyPath::input);
    v("xy", xy,
      "values of one or two keys, as cfg:3,5,7;sampler:euler,dpmpp_2m, each combination of which is generated; next to "
      "the images a sheet of all, with the first key's values as columns; empty: none");
    v("lora_dir", lora_dir, "folder of the LoRA files that <lora:name:0.8> in prompts names", KeyPath::input);
  }
};

}  // namespace md
