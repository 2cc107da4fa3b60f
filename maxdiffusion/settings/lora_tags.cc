#include "maxdiffusion/settings/lora_tags.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/config/flow.h"
#include "maxdiffusion/data/folders/named_files.h"

namespace md {
namespace {

using Tags = std::vector<std::pair<std::string, double>>;  // file, scale

Tags take_tags(const std::string& key, std::string& prompt, NamedFiles& files) {
  Tags out;
  const std::string head = "<lora:";
  for (size_t at = 0; (at = prompt.find(head, at)) != prompt.npos;) {
    const size_t end = prompt.find('>', at);
    check(end != prompt.npos, Code::invalid_config, "{}: '<lora:' is not closed; expected <lora:NAME:SCALE>", key);
    const std::string tag = prompt.substr(at, end - at + 1),
                      inside = prompt.substr(at + head.size(), end - at - head.size());
    const size_t colon = inside.find(':');
    const auto scale = colon == inside.npos ? 1.0 : read_number(inside.substr(colon + 1));
    check(scale.has_value(), Code::invalid_config, "{}: {} has no number as its scale; expected <lora:NAME:SCALE>", key,
          tag);
    out.emplace_back(files.path(inside.substr(0, colon), fmt::format("{}: {}", key, tag)), *scale);
    prompt.erase(at, tag.size());
  }
  return out;
}

}  // namespace

bool take_lora_tags(SampleKeys& sample, LoraKeys& lora, const std::string& lora_dir) {
  NamedFiles files("lora_dir", lora_dir, ".safetensors");
  std::optional<Tags> tags;
  for (std::string& prompt : sample.prompt) {
    Tags its = take_tags("prompt", prompt, files);
    if (tags && *tags != its)
      throw Error(Code::invalid_config,
                  "prompt: prompts that are sampled together name different LoRA files; expected the same")
          .note("try: prompt_file=FILE, with each prompt on its line");
    tags = std::move(its);
  }
  for (const auto& [key, texts] :
       std::vector<std::pair<std::string, Texts*>>{{"negative_prompt", &sample.negative_prompt},
                                                   {"prompt_2", &sample.prompt_2},
                                                   {"negative_prompt_2", &sample.negative_prompt_2}})
    for (std::string& prompt : *texts)
      check(take_tags(key, prompt, files).empty(), Code::invalid_config,
            "{} names a LoRA file; expected its tag in prompt", key);
  if (!tags || tags->empty()) return false;
  lora.lora_files = split_at_commas(lora.lora_files);
  if (lora.lora_scales.empty()) lora.lora_scales.assign(lora.lora_files.size(), 1);
  for (const auto& [file, scale] : *tags) {
    lora.lora_files.push_back(file);
    lora.lora_scales.push_back(scale);
  }
  return true;
}

}  // namespace md
