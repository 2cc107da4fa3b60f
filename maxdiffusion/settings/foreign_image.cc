#include "maxdiffusion/settings/foreign_image.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/config/flow.h"
#include "maxdiffusion/schedulers/sampler_names.h"

namespace md {
namespace {

using nlohmann::json;
using Pairs = std::vector<std::pair<std::string, std::string>>;

std::string without_spaces(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  return first == text.npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

/// "Steps: 20, Size: 64x96, Note: \"a, b\"" as pairs. Quoted values are JSON.
Pairs pairs_of(const std::string& line) {
  Pairs out;
  for (size_t at = 0; at < line.size();) {
    const size_t colon = line.find(':', at);
    if (colon == line.npos) break;
    std::string name = line.substr(at, colon - at);
    name = without_spaces(name.substr(name.rfind(',') + 1));
    size_t begin = line.find_first_not_of(' ', colon + 1), end = 0;
    begin = std::min(begin, line.size());
    std::string value;
    if (begin < line.size() && line[begin] == '"') {
      for (end = begin + 1; end < line.size() && line[end] != '"'; ++end)
        if (line[end] == '\\') ++end;
      end = std::min(end + 1, line.size());
      const json text = parse_json_or_discard(line.substr(begin, end - begin));
      value = text.is_string() ? text.get<std::string>() : line.substr(begin, end - begin);
      end = std::min(line.find(',', end), line.size());
    } else {
      end = std::min(line.find(',', begin), line.size());
      value = without_spaces(line.substr(begin, end - begin));
    }
    if (!name.empty()) out.emplace_back(name, value);
    at = end + 1;
  }
  return out;
}

struct WebUiText {
  std::string prompt, negative_prompt;
  Pairs settings;
};

/// The prompt, "Negative prompt: …" and the line of settings, which has at least three.
WebUiText parts_of(const std::string& text) {
  WebUiText out;
  std::string prompts = without_spaces(text);
  const size_t last = prompts.rfind('\n');
  const size_t begin = last == prompts.npos ? 0 : last + 1;
  if (Pairs found = pairs_of(prompts.substr(begin)); found.size() >= 3) {
    out.settings = std::move(found);
    prompts.resize(begin);
  }
  const std::string mark = "Negative prompt:";
  size_t negative = prompts.starts_with(mark) ? 0 : prompts.find("\n" + mark);
  if (negative != prompts.npos && negative != 0) ++negative;
  out.prompt = without_spaces(prompts.substr(0, negative));
  if (negative != prompts.npos) out.negative_prompt = without_spaces(prompts.substr(negative + mark.size()));
  return out;
}

/// The sides in "64x96".
std::optional<std::pair<int64_t, int64_t>> sides_of(const std::string& size) {
  const size_t by = std::min(size.find('x'), size.size());
  const auto width = read_whole(size.substr(0, by)), height = read_whole(size.substr(std::min(by + 1, size.size())));
  return width && height ? std::optional(std::pair(*width, *height)) : std::nullopt;
}

std::optional<double> number_of(const json& value) {
  return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
}

/// Sets `key` to a number; returns whether the text is one.
bool set_number(ForeignSettings& s, const char* key, const std::string& text) {
  const bool is_one = read_number(text).has_value();
  if (is_one) s.keys[key] = text;
  return is_one;
}

/// Sets the sampler and its levels; returns those of the two that are unknown.
void set_sampler(ForeignSettings& s, const std::string& sampler, const std::string& schedule) {
  const std::string name = sampler_name(sampler);
  if (!name.empty())
    s.keys["scheduler"] = quoted(name);
  else if (!sampler.empty())
    s.unused.push_back("Sampler: " + sampler);
  if (schedule.empty()) return;
  if (schedule == "Automatic" || schedule == "automatic") {
    s.automatic_schedule = automatic_schedule(name);
    return;
  }
  const std::string levels = schedule_named(schedule);
  if (!levels.empty())
    s.keys["sigma_schedule"] = quoted(levels);
  else
    s.unused.push_back("Schedule type: " + schedule);
}

/// A graph of ComfyUI: nodes by id.
class ComfyGraph {
 public:
  ComfyGraph(const json& nodes, ForeignSettings& settings) : nodes_(nodes), s_(settings) {}

  /// The input of a node; null: it has none.
  json input(const json& node, const char* name) const {
    const auto inputs = node.find("inputs");
    return inputs == node.end() || !inputs->is_object() ? json() : inputs->value(name, json());
  }
  /// The node that an input is linked to; null: it is none. Marks it as read.
  const json* linked(const json& link) {
    if (!link.is_array() || link.empty() || !link[0].is_string()) return nullptr;
    const auto node = nodes_.find(link[0].get<std::string>());
    if (node == nodes_.end() || !node->is_object() || !read_.insert(node.key()).second) return nullptr;
    return &*node;
  }
  /// Sets `key` to the text of the conditioning behind a link.
  void set_text(const char* key, const json& link) {
    for (const json* node = linked(link); node;) {
      if (const json text = input(*node, "text"); text.is_string()) {
        s_.keys[key] = quoted(text.get<std::string>());
        return;
      }
      if (const auto guidance = number_of(input(*node, "guidance")))
        s_.keys["guidance_scale"] = print_double(*guidance);
      node = linked(input(*node, "conditioning").is_null()
                        ? input(*node, key == std::string("prompt") ? "positive" : "negative")
                        : input(*node, "conditioning"));
    }
  }
  bool was_read(const std::string& id) const { return read_.contains(id); }

 private:
  const json& nodes_;
  ForeignSettings& s_;
  std::set<std::string> read_;
};

}  // namespace

ForeignSettings settings_of_web_ui(const std::string& text) {
  ForeignSettings s{.keys = {}, .unused = {}, .prompt_syntax = "a1111", .automatic_schedule = {}};
  const WebUiText parts = parts_of(text);
  const Pairs& pairs = parts.settings;
  s.keys["prompt"] = quoted(parts.prompt);
  if (!parts.negative_prompt.empty()) s.keys["negative_prompt"] = quoted(parts.negative_prompt);
  std::map<std::string, std::string> values(pairs.begin(), pairs.end());
  const auto take = [&](const char* name) {
    const auto found = values.find(name);
    return found == values.end() ? std::string() : values.extract(found).mapped();
  };
  const auto number = [&](const char* name, const char* key) {
    if (const std::string value = take(name); !value.empty() && !set_number(s, key, value))
      s.unused.push_back(fmt::format("{}: {}", name, value));
  };
  const std::string sampler = take("Sampler");
  set_sampler(s, sampler, take("Schedule type"));
  number("Steps", "num_inference_steps"), number("Seed", "sample_seed");
  if (values.contains("Distilled CFG Scale"))
    number("Distilled CFG Scale", "guidance_scale"), number("CFG scale", "true_cfg_scale");
  else
    number("CFG scale", "guidance_scale");
  if (const std::string size = take("Size"); !size.empty()) {
    if (const auto sides = sides_of(size))
      s.keys["width"] = std::to_string(sides->first), s.keys["height"] = std::to_string(sides->second);
    else
      s.unused.push_back("Size: " + size);
  }
  if (const std::string skip = take("Clip skip"); !skip.empty()) {
    if (const auto layers = read_whole(skip); layers && *layers >= 1)
      s.keys["clip_skip"] = std::to_string(*layers - 1);
    else
      s.unused.push_back("Clip skip: " + skip);
  }
  if (values.contains("Hires upscale")) {
    number("Hires upscale", "hires_scale"), number("Denoising strength", "hires_strength");
    const std::string upscaler = take("Hires upscaler");
    if (upscaler == "Latent" || upscaler == "Lanczos" || upscaler == "None")
      s.keys["hires_upscaler"] = upscaler == "Latent" ? "latent" : "lanczos";
    else if (!upscaler.empty())
      s.unused.push_back("Hires upscaler: " + upscaler);
  }
  for (const auto& [name, value] : pairs)
    if (values.contains(name)) s.unused.push_back(fmt::format("{}: {}", name, shortened(value, 40)));
  return s;
}

std::vector<std::pair<std::string, std::string>> fields_of_web_ui(const std::string& text) {
  const WebUiText parts = parts_of(text);
  Pairs out = {{"Prompt", parts.prompt}, {"Negative prompt", parts.negative_prompt}};
  for (const auto& [name, value] : parts.settings)
    if (const auto sides = sides_of(value)) {
      out.emplace_back(name + "-1", std::to_string(sides->first));
      out.emplace_back(name + "-2", std::to_string(sides->second));
    } else {
      out.emplace_back(name, value);
    }
  return out;
}

ForeignSettings settings_of_comfyui(const std::string& text, const std::string& image) {
  ForeignSettings s{.keys = {}, .unused = {}, .prompt_syntax = "comfyui", .automatic_schedule = {}};
  const json nodes = parse_json_or_discard(text);
  check(nodes.is_object(), Code::io, "'{}': its text `prompt` is no graph of ComfyUI; expected a JSON object", image);
  ComfyGraph graph(nodes, s);
  const json* sampling = nullptr;
  std::string its_id;
  for (const auto& [id, node] : nodes.items())
    if (node.is_object() && !graph.input(node, "sampler_name").is_null() && !graph.input(node, "positive").is_null()) {
      sampling = &node, its_id = id;
      break;
    }
  check(sampling, Code::io, "'{}': its ComfyUI graph has no node with sampler_name and positive, such as KSampler",
        image);
  for (const auto& [name, key] : {std::pair{"seed", "sample_seed"},
                                  {"noise_seed", "sample_seed"},
                                  {"steps", "num_inference_steps"},
                                  {"cfg", "guidance_scale"}})
    if (const json value = graph.input(*sampling, name); value.is_number()) s.keys[key] = dump_json(value);
  if (const auto part = number_of(graph.input(*sampling, "denoise")); part && *part != 1)
    s.unused.push_back(fmt::format("denoise: {}", *part));
  const auto word = [&](const char* name) {
    const json value = graph.input(*sampling, name);
    return value.is_string() ? value.get<std::string>() : std::string();
  };
  set_sampler(s, word("sampler_name"), word("scheduler"));
  graph.set_text("prompt", graph.input(*sampling, "positive"));
  graph.set_text("negative_prompt", graph.input(*sampling, "negative"));
  if (const json* latent = graph.linked(graph.input(*sampling, "latent_image")))
    for (const auto& [name, key] :
         {std::pair{"width", "width"}, {"height", "height"}, {"batch_size", "num_images_per_prompt"}})
      if (const json value = graph.input(*latent, name); value.is_number_integer()) s.keys[key] = dump_json(value);
  const std::set<std::string> without_settings = {"VAEDecode", "SaveImage", "PreviewImage"};
  for (const auto& [id, node] : nodes.items()) {
    if (id == its_id || graph.was_read(id) || !node.is_object()) continue;
    const json name = node.value("class_type", json());
    if (name.is_string() && !without_settings.contains(name.get<std::string>()))
      s.unused.push_back("node " + shortened(name.get<std::string>(), 40));
  }
  return s;
}

std::optional<ForeignSettings> foreign_settings(const std::map<std::string, std::string>& texts,
                                                const std::string& image) {
  if (const auto web_ui = texts.find("parameters"); web_ui != texts.end()) return settings_of_web_ui(web_ui->second);
  if (const auto graph = texts.find("prompt"); graph != texts.end()) return settings_of_comfyui(graph->second, image);
  return std::nullopt;
}

}  // namespace md
