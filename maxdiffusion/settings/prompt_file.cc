#include "maxdiffusion/settings/prompt_file.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "maxdiffusion/base/decoded_text.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/naming_key.h"
#include "maxdiffusion/base/nearest.h"

namespace md {
namespace {

/// The script's names of keys.
const std::map<std::string, std::string> kKeys = {
    {"seed", "sample_seed"},       {"steps", "num_inference_steps"},        {"cfg_scale", "guidance_scale"},
    {"sampler_name", "scheduler"}, {"batch_size", "num_images_per_prompt"}, {"n_iter", "num_images_per_prompt"}};

/// Keys with texts, which are read literally and need no quotes.
const std::set<std::string> kTexts = {"prompt", "negative_prompt", "prompt_2", "negative_prompt_2"};

struct Word {
  std::string text;
  bool quoted = false;
};

/// Words of a POSIX shell line, without expansions.
std::vector<Word> words_of(const std::string& line, const std::string& where) {
  std::vector<Word> out;
  bool inside = false;
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote == 0 && std::isspace(static_cast<unsigned char>(c)) != 0) {
      inside = false;
      continue;
    }
    if (!inside) out.emplace_back();
    inside = true;
    if (c == quote) {
      quote = 0;
    } else if (quote == 0 && (c == '"' || c == '\'')) {
      quote = c;
      out.back().quoted = true;
    } else if (c == '\\' && i + 1 < line.size() &&
               (quote == 0 || (quote == '"' && (line[i + 1] == '"' || line[i + 1] == '\\')))) {
      out.back().text += line[++i];
    } else {
      out.back().text += c;
    }
  }
  check(quote == 0, Code::invalid_config, "prompt_file: {}: a quote {} is not closed; expected a second one", where,
        quote);
  return out;
}

bool is_option(const Word& word) { return !word.quoted && word.text.starts_with("--"); }

void set_options(const std::string& line, const std::string& where, RunConfig& c) {
  const std::vector<Word> words = words_of(line, where);
  KeyList keys;
  keys.add(static_cast<SampleKeys&>(c.sample));
  keys.add(c.scheduler);
  std::set<std::string> options_read;
  for (size_t i = 0; i < words.size();) {
    check(is_option(words[i]), Code::invalid_config, "prompt_file: {}: '{}'; expected an option, as in --steps 20",
          where, words[i].text);
    std::string option = words[i++].text.substr(2);
    std::ranges::replace(option, '-', '_');
    const std::string name = key_of_option(option);
    const auto key = std::ranges::find(keys.keys(), name, &ConfigKey::name);
    if (key == keys.keys().end()) {
      std::vector<std::string> options = {"prompt", "negative_prompt", "width", "height"};
      for (const auto& [its, of_ours] : kKeys) options.push_back(its);
      std::string near = nearest(option, options);
      if (near.empty()) {
        std::vector<std::string> names;
        for (const ConfigKey& k : keys.keys()) names.push_back(k.name);
        near = nearest(option, names);
      }
      Error error(Code::invalid_config,
                  fmt::format("prompt_file: {}: the option --{} is unknown; expected one of: {}, or a key of sampling",
                              where, option, nearest_first(option, options)));
      if (!near.empty()) error.note("try: --" + near);
      throw error;
    }
    check(i < words.size() && !is_option(words[i]), Code::invalid_config,
          "prompt_file: {}: --{} is given without its value; expected one, as in --{} VALUE", where, option, option);
    check(options_read.insert(name).second, Code::invalid_config,
          "prompt_file: {}: --{} gives {} again; expected it once", where, option, name);
    ConfigValue value{.text = words[i++].text, .where = where, .kind = ConfigValue::Kind::word};
    if (kTexts.contains(name)) {
      value.kind = ConfigValue::Kind::quoted;
      for (; i < words.size() && !is_option(words[i]); ++i) value.text += " " + words[i].text;
    }
    key->set(value);
    c.on_command_line.insert(name);
  }
}

}  // namespace

std::string key_of_option(const std::string& option) {
  const auto known = kKeys.find(option);
  return known == kKeys.end() ? option : known->second;
}

std::vector<PromptLine> prompt_lines(const RunConfig& config) {
  const std::string& file = config.prompts.prompt_file;
  std::vector<PromptLine> out;
  std::istringstream in(naming_key("prompt_file", [&] { return read_text_file(file); }));
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const char* blanks = " \t\r\f\v";
    line.erase(line.find_last_not_of(blanks) + 1);
    line.erase(0, line.find_first_not_of(blanks));
    if (line.empty()) continue;
    PromptLine& made = out.emplace_back(PromptLine{config, fmt::format("{}:{}", file, number)});
    if (line.starts_with("--")) {
      set_options(line, made.where, made.config);
    } else {
      made.config.sample.prompt = {line};
      made.config.on_command_line.insert("prompt");
    }
  }
  check(!out.empty(), Code::invalid_config, "prompt_file: '{}' has no lines; expected a prompt on each", file);
  return out;
}

}  // namespace md
