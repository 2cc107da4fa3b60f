#include "maxdiffusion/settings/lora_tags.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/config/flow.h"
#include "maxdiffusion/data/folders/named_files.h"

namespace md {
namespace {

struct Tag {
  std::string file;
  double scale = 1;
  std::optional<double> text_scale = {};  // absent: scale
  std::string block_weights = {}, steps = {};
  bool operator==(const Tag&) const = default;
  bool has_text_scale() const { return text_scale.has_value(); }
  bool has_block_weights() const { return !block_weights.empty(); }
  bool has_steps() const { return !steps.empty(); }
};
using Tags = std::vector<Tag>;

constexpr const char* kForm = "<lora:NAME:SCALE>, or with te=, unet=, lbw=, start=, stop=, step= after further colons";

/// The parameters of a tag after its name. `tag`: for messages.
Tag read_tag(const std::string& tag, const std::string& parameters) {
  Tag out;
  std::optional<double> text, unet;
  std::string start, stop, step;
  const auto number = [&](const std::string& value) {
    const auto read = read_number(value);
    check(read.has_value(), Code::invalid_config, "{} has '{}' as its scale; expected a number, as in {}", tag, value,
          kForm);
    return *read;
  };
  int64_t place = 0;  // among the parameters without names
  for (size_t at = 0, end = 0; end != parameters.npos && !parameters.empty(); at = end + 1) {
    end = parameters.find(':', at);
    const std::string parameter = parameters.substr(at, end == parameters.npos ? end : end - at);
    const size_t equal = parameter.find('=');
    const std::string name = equal == parameter.npos ? "" : parameter.substr(0, equal),
                      value = equal == parameter.npos ? parameter : parameter.substr(equal + 1);
    if (name.empty()) {
      const int64_t here = place++;
      if (here == 0)
        text = number(value);
      else if (here == 1 && read_number(value))
        unet = number(value);
      else if (here == 1)
        out.block_weights = value;
      else
        fail(Code::invalid_config, "{} has '{}'; expected {}", tag, value, kForm);
    } else if (name == "te") {
      text = number(value);
    } else if (name == "unet") {
      unet = number(value);
    } else if (name == "lbw") {
      out.block_weights = value;
    } else if (name == "start") {
      start = value;
    } else if (name == "stop") {
      stop = value;
    } else if (name == "step") {
      step = value;
    } else {
      fail(Code::invalid_config, "{} has '{}'; expected {}", tag, parameter, kForm);
    }
  }
  check(step.empty() || (start.empty() && stop.empty()), Code::invalid_config,
        "{} has step= and start= or stop=; expected one of them", tag);
  out.steps = !step.empty() ? step : start.empty() && stop.empty() ? "" : start + "-" + stop;
  check(read_step_range(out.steps).has_value(), Code::invalid_config,
        "{} has '{}' as its steps; expected numbers, as in start=5, stop=0.8 or step=5-10", tag, out.steps);
  out.scale = unet.value_or(text.value_or(1));
  if (text && *text != out.scale) out.text_scale = text;
  if (unet && !text) out.text_scale = 1;
  return out;
}

Tags take_tags(const std::string& key, std::string& prompt, NamedFiles& files) {
  Tags out;
  const std::string head = "<lora:";
  for (size_t at = 0; (at = prompt.find(head, at)) != prompt.npos;) {
    const size_t end = prompt.find('>', at);
    check(end != prompt.npos, Code::invalid_config, "{}: '<lora:' is not closed; expected <lora:NAME:SCALE>", key);
    const std::string tag = prompt.substr(at, end - at + 1),
                      inside = prompt.substr(at + head.size(), end - at - head.size());
    const size_t colon = std::min(inside.find(':'), inside.size());
    const std::string written = fmt::format("{}: {}", key, tag);
    Tag& its = out.emplace_back(read_tag(written, inside.substr(std::min(colon + 1, inside.size()))));
    its.file = files.path(inside.substr(0, colon), written);
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
  lora.lora_files = split_paths(lora.lora_files);
  const size_t before = lora.lora_files.size();
  if (before == 1 && !lora.lora_block_weights.empty())
    lora.lora_block_weights = {fmt::format("{}", fmt::join(lora.lora_block_weights, ","))};
  lora.lora_steps = split_at_commas(lora.lora_steps);
  const bool text = !lora.lora_text_scales.empty() || std::ranges::any_of(*tags, &Tag::has_text_scale),
             blocks = !lora.lora_block_weights.empty() || std::ranges::any_of(*tags, &Tag::has_block_weights),
             steps = !lora.lora_steps.empty() || std::ranges::any_of(*tags, &Tag::has_steps);
  if (lora.lora_scales.empty()) lora.lora_scales.assign(before, 1);
  if (text && lora.lora_text_scales.empty()) lora.lora_text_scales = lora.lora_scales;
  if (blocks && lora.lora_block_weights.empty()) lora.lora_block_weights.assign(before, "ALL");
  if (steps && lora.lora_steps.empty()) lora.lora_steps.assign(before, "-");
  for (const Tag& tag : *tags) {
    lora.lora_files.push_back(tag.file);
    lora.lora_scales.push_back(tag.scale);
    if (text) lora.lora_text_scales.push_back(tag.text_scale.value_or(tag.scale));
    if (blocks) lora.lora_block_weights.push_back(tag.has_block_weights() ? tag.block_weights : "ALL");
    if (steps) lora.lora_steps.push_back(tag.has_steps() ? tag.steps : "-");
  }
  return true;
}

}  // namespace md
