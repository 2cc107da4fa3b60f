#include "maxdiffusion/settings/xy_axes.h"

#include <algorithm>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/settings/prompt_file.h"

namespace md {
namespace {

/// Splits at `separator` outside of brackets and quotes and trims blanks.
std::vector<std::string> parts_of(const std::string& text, char separator) {
  std::vector<std::string> parts = {""};
  int64_t depth = 0;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"') {
      quote = c;
    } else if (c == '[' || c == '{' || c == '(') {
      ++depth;
    } else if (c == ']' || c == '}' || c == ')') {
      --depth;
    } else if (c == separator && depth <= 0) {
      parts.emplace_back();
      continue;
    }
    parts.back() += c;
  }
  for (std::string& part : parts) {
    part.erase(part.find_last_not_of(" \t") + 1);
    part.erase(0, part.find_first_not_of(" \t"));
  }
  return parts;
}

std::string without_quotes(const std::string& text) {
  const bool quoted = text.size() > 1 && text.front() == '"' && text.find('"', 1) == text.size() - 1;
  return quoted ? text.substr(1, text.size() - 2) : text;
}

/// Adds the keys that may differ between items: the others belong to the loaded model, or name files and folders.
void add_keys(KeyList& keys, RunConfig& c) {
  keys.add(static_cast<SampleKeys&>(c.sample));
  keys.add(c.scheduler), keys.add(c.step_cache), keys.add(c.lora), keys.add(c.control);
}

const std::set<std::string>& excluded() {
  // Keys of the loaded model, keys of files that are read once, and keys that would give cells different numbers of
  // images.
  static const std::set<std::string> names = {"num_images_per_prompt",
                                              "controlnet_model_name_or_path",
                                              "controlnet_image",
                                              "controlnet_preprocessor",
                                              "train_lora",
                                              "preview_every"};
  return names;
}

std::vector<std::string> key_names() {
  RunConfig c;
  KeyList keys;
  add_keys(keys, c);
  std::vector<std::string> names;
  for (const ConfigKey& k : keys.keys())
    if (!excluded().contains(k.name)) names.push_back(k.name);
  return names;
}

}  // namespace

std::vector<XyAxis> xy_axes(const std::string& text) {
  static const std::vector<std::string> known = key_names();
  std::vector<XyAxis> axes;
  for (const std::string& part : parts_of(text, ';')) {
    const size_t colon = part.find(':');
    if (colon == std::string::npos || colon == 0)
      throw Error(
          Code::invalid_config,
          fmt::format("xy: '{}' is no axis; expected one or two keys with values, separated by a semicolon", part))
          .note("try: xy=\"cfg:3,5,7;sampler:euler,dpmpp_2m\"");
    XyAxis axis{.name = part.substr(0, colon), .key = key_of_option(part.substr(0, colon)), .values = {}};
    if (axis.name == "cfg") axis.key = "guidance_scale";
    if (axis.name == "sampler") axis.key = "scheduler";
    if (std::ranges::count(known, axis.key) == 0) {
      Error error(
          Code::invalid_config,
          fmt::format("xy: '{}' cannot be an axis; expected a key of sampling, a sampler's, a cache's or LoRA's, "
                      "or one of: cfg, sampler, seed, steps",
                      axis.name));
      if (const std::string near = nearest(axis.key, known); !near.empty()) error.note("try: " + near);
      throw error;
    }
    for (const std::string& value : parts_of(part.substr(colon + 1), ',')) {
      axis.values.push_back(without_quotes(value));
      check(!value.empty(), Code::invalid_config, "xy: {} has an empty value; expected values, as in {}:1,2", axis.name,
            axis.name);
    }
    axes.push_back(std::move(axis));
  }
  check(axes.size() <= 2, Code::invalid_config, "xy has {} axes; expected one or two", axes.size());
  check(axes.size() < 2 || axes[0].key != axes[1].key, Code::invalid_config, "xy: {} is both axes; expected two keys",
        axes[0].key);
  return axes;
}

std::vector<RunConfig> xy_configs(const RunConfig& config, const std::vector<XyAxis>& axes) {
  std::vector<RunConfig> all;
  const size_t rows = axes.size() > 1 ? axes[1].values.size() : 1;
  for (size_t row = 0; row < rows; ++row)
    for (size_t column = 0; column < axes[0].values.size(); ++column) {
      RunConfig& c = all.emplace_back(config);
      KeyList keys;
      add_keys(keys, c);
      for (size_t i = 0; i < axes.size(); ++i) {
        const XyAxis& axis = axes[i];
        const bool literal = axis.key.find("prompt") != std::string::npos && axis.key != "prompt_syntax";
        std::ranges::find(keys.keys(), axis.key, &ConfigKey::name)
            ->set({.text = axis.values[i == 0 ? column : row],
                   .where = "xy",
                   .kind = literal ? ConfigValue::Kind::quoted : ConfigValue::Kind::word});
        c.on_command_line.insert(axis.key);
      }
    }
  return all;
}

}  // namespace md
