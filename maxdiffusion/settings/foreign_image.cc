#include "maxdiffusion/settings/foreign_image.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
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

/// The prompt, "Negative prompt: …" and the line of settings, which has at least three: the last line, or the last one
/// that begins with "Steps:", behind which extensions write further lines.
WebUiText parts_of(const std::string& text) {
  WebUiText out;
  std::vector<std::string> lines;
  std::istringstream in(without_spaces(text));
  for (std::string line; std::getline(in, line);) lines.push_back(without_spaces(line));
  size_t settings = lines.size();
  for (size_t i = lines.size(); i-- > 0 && out.settings.empty();)
    if (i + 1 == lines.size() || lines[i].starts_with("Steps:"))
      if (Pairs found = pairs_of(lines[i]); found.size() >= 3) settings = i, out.settings = std::move(found);
  for (size_t i = settings + 1; i < lines.size(); ++i)
    if (const size_t colon = lines[i].find(':'); !lines[i].empty())
      out.settings.emplace_back(lines[i].substr(0, colon),
                                colon == lines[i].npos ? "" : without_spaces(lines[i].substr(colon + 1)));
  const std::string mark = "Negative prompt:";
  std::string* part = &out.prompt;
  for (size_t i = 0; i < settings; ++i) {
    if (part == &out.prompt && lines[i].starts_with(mark)) {
      part = &out.negative_prompt;
      lines[i] = without_spaces(lines[i].substr(mark.size()));
    }
    *part += (part->empty() ? "" : "\n") + lines[i];
  }
  out.prompt = without_spaces(out.prompt), out.negative_prompt = without_spaces(out.negative_prompt);
  return out;
}

/// The sides in "64x96".
std::optional<std::pair<int64_t, int64_t>> sides_of(const std::string& size) {
  const size_t by = std::min(size.find('x'), size.size());
  const auto width = read_whole(size.substr(0, by)), height = read_whole(size.substr(std::min(by + 1, size.size())));
  return width && height ? std::optional(std::pair(*width, *height)) : std::nullopt;
}

/// Sets `key` to a number; returns whether the text is one.
bool set_number(ForeignSettings& s, const char* key, const std::string& text) {
  const bool is_one = read_number(text).has_value();
  if (is_one) s.keys[key] = text;
  return is_one;
}

/// Sets the sampler and its levels; adds those of the two that are unknown to `unused`.
void set_sampler(ForeignSettings& s, const std::string& sampler, const std::string& schedule) {
  const WebUiSampler known = web_ui_sampler(sampler);
  if (!known.name.empty())
    s.keys["scheduler"] = quoted(known.name);
  else if (!sampler.empty())
    s.unused.push_back("Sampler: " + sampler);
  if (!known.schedule.empty()) s.keys["sigma_schedule"] = quoted(known.schedule);
  if (schedule.empty()) return;
  if (schedule == "Automatic" || schedule == "automatic") {
    if (known.schedule.empty()) s.automatic_schedule = automatic_schedule(known.name);
    return;
  }
  const std::string levels = schedule_named(schedule);
  if (!levels.empty() && !steps_over_timesteps(known.name))
    s.keys["sigma_schedule"] = quoted(levels);
  else if (levels != "training")
    s.unused.push_back("Schedule type: " + schedule);
}

/// A graph of ComfyUI: nodes by id.
class ComfyGraph {
 public:
  ComfyGraph(const json& nodes, ForeignSettings& settings) : nodes_(nodes), s_(settings) {}

  /// The input of a node; null: it has none.
  static json input(const json& node, const std::string& name) {
    const auto inputs = node.find("inputs");
    return inputs == node.end() || !inputs->is_object() ? json() : inputs->value(name, json());
  }
  /// The id of the node that an input is linked to; empty: it is none.
  std::string link(const json& input) const {
    const bool links = input.is_array() && !input.empty() && input[0].is_string();
    const auto node = links ? nodes_.find(input[0].get<std::string>()) : nodes_.end();
    return node == nodes_.end() || !node->is_object() ? "" : node.key();
  }
  const json& node(const std::string& id) const { return nodes_.at(id); }
  /// An input that is no link, or the value of the node that it is linked to, which is marked as read. Null: there is
  /// none, or another node computes it, which is named in `unused`.
  json value(const json& node, const std::string& name) {
    const json node_value = input(node, name);
    const std::string id = link(node_value);
    if (id.empty() && !node_value.is_structured()) return node_value;
    for (const std::string& its : {std::string("value"), name, std::string("seed"), std::string("int"),
                                   std::string("number"), std::string("string"), std::string("text")})
      if (const json found = id.empty() ? json() : input(nodes_[id], its); found.is_number() || found.is_string()) {
        read_.insert(id);
        return found;
      }
    s_.unused.push_back(name + " of another node");
    return {};
  }
  /// Sets `prompt` or `negative_prompt`, and the second one, to the texts of the conditioning behind an input.
  void set_text(const std::string& key, const json& conditioning) {
    std::set<std::string> seen;
    for (std::string id = link(conditioning); !id.empty() && seen.insert(id).second;) {
      const json& its = nodes_[id];
      const json guidance = input(its, "guidance");
      if (guidance.is_number()) s_.keys["guidance_scale"] = print_double(guidance);
      if (its.value("class_type", json()) == "ConditioningZeroOut") {
        read_.insert(id);
        return;
      }
      // Nodes with a text for each text encoder, then those with one.
      for (const auto& [first, second] : {std::pair{"text_l", "text_g"}, {"clip_l", "t5xxl"}, {"clip_l", "clip_g"}})
        if (!input(its, first).is_null() && !input(its, second).is_null()) {
          read_.insert(id);
          const json one = value(its, first), two = value(its, second);
          if (one.is_string()) s_.keys[key] = quoted(one.get<std::string>());
          if (two.is_string() && two != one) s_.keys[key + "_2"] = quoted(two.get<std::string>());
          return;
        }
      for (const char* name : {"text", "prompt", "user_prompt"})
        if (!input(its, name).is_null()) {
          read_.insert(id);
          if (const json text = value(its, name); text.is_string()) s_.keys[key] = quoted(text.get<std::string>());
          return;
        }
      if (guidance.is_number()) read_.insert(id);  // others change the conditioning in ways that are not used
      json next = input(its, "conditioning");
      for (const char* name : {key == "prompt" ? "positive" : "negative", "conditioning_1", "conditioning_to"})
        if (next.is_null()) next = input(its, name);
      id = link(next);
    }
    s_.unused.push_back(key + " of another node");
  }
  /// Whether a node of `others` leads to this one.
  bool follows(const std::string& id, const std::set<std::string>& others) const {
    std::set<std::string> seen = {id};
    for (std::vector<std::string> open = {id}; !open.empty();) {
      const json& its = nodes_[open.back()];
      open.pop_back();
      const auto inputs = its.find("inputs");
      if (inputs == its.end() || !inputs->is_object()) continue;
      for (const json& one : *inputs)
        if (const std::string from = link(one); !from.empty() && seen.insert(from).second) {
          if (others.contains(from)) return true;
          open.push_back(from);
        }
    }
    return false;
  }
  void mark_read(const std::string& id) { read_.insert(id); }
  bool was_read(const std::string& id) const { return read_.contains(id); }

 private:
  const json& nodes_;
  ForeignSettings& s_;
  std::set<std::string> read_;
};

/// Whether a node samples: KSampler and its kin, or SamplerCustom and SamplerCustomAdvanced, whose settings are in
/// nodes of their own.
bool samples(const json& node) {
  const auto has = [&](const char* name) { return !ComfyGraph::input(node, name).is_null(); };
  return node.is_object() &&
         ((has("sampler_name") && has("positive")) || (has("sampler") && has("sigmas") && has("latent_image")));
}

/// The id of the node of the first pass: no other sampling node leads to it. Empty: there is none.
std::string first_sampling_node(const json& nodes, const ComfyGraph& graph) {
  std::vector<std::string> ids;
  for (const auto& [id, node] : nodes.items())
    if (samples(node)) ids.push_back(id);
  std::ranges::stable_sort(ids, {}, [](const std::string& id) { return std::pair(id.size(), id); });  // "9" before "10"
  const std::set<std::string> all(ids.begin(), ids.end());
  const auto first = std::ranges::find_if(ids, [&](const std::string& id) { return !graph.follows(id, all); });
  return first != ids.end() ? *first : ids.empty() ? "" : ids[0];
}

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
  number("Steps", "num_inference_steps");
  if (const std::string seed = take("Seed"); read_seed(seed))
    s.keys["sample_seed"] = seed;
  else if (!seed.empty())
    s.unused.push_back("Seed: " + seed);
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
  const std::string first = first_sampling_node(nodes, graph);
  check(!first.empty(), Code::io,
        "'{}': its ComfyUI graph has no node with sampler_name and positive, such as KSampler, and none with sampler, "
        "sigmas and latent_image, such as SamplerCustomAdvanced",
        image);
  std::vector<std::string> sampling = {first};  // the node, and those that hold its settings
  for (const char* name : {"noise", "guider", "sampler", "sigmas"})
    if (const std::string id = graph.link(graph.input(graph.node(first), name)); !id.empty()) sampling.push_back(id);
  const auto holder = [&](const std::string& name) -> const json* {
    for (const std::string& id : sampling)
      if (!graph.input(graph.node(id), name).is_null()) {
        graph.mark_read(id);
        return &graph.node(id);
      }
    return nullptr;
  };
  const auto value = [&](const std::string& name) {
    const json* node = holder(name);
    return node ? graph.value(*node, name) : json();
  };
  graph.mark_read(first);
  for (const auto& [name, key] : {std::pair{"seed", "sample_seed"},
                                  {"noise_seed", "sample_seed"},
                                  {"steps", "num_inference_steps"},
                                  {"cfg", "guidance_scale"}})
    if (const json node_value = value(name); node_value.is_number()) s.keys[key] = dump_json(node_value);
  if (const json part = value("denoise"); part.is_number() && part != 1)
    s.unused.push_back(fmt::format("denoise: {}", dump_json(part)));
  if (const json from = value("start_at_step"); from.is_number() && from != 0)
    s.unused.push_back(fmt::format("start_at_step: {}", dump_json(from)));
  if (const json to = value("end_at_step"); to.is_number() && to < value("steps"))
    s.unused.push_back(fmt::format("end_at_step: {}", dump_json(to)));
  const auto word = [&](const char* name) {
    const json node_value = value(name);
    return node_value.is_string() ? node_value.get<std::string>() : std::string();
  };
  const std::string sampler = word("sampler_name");
  set_sampler(s, sampler == "ddim" ? "euler" : sampler, word("scheduler"));  // ComfyUI's ddim is Euler over its levels
  const json *positive = holder("positive"), *basic = positive ? nullptr : holder("conditioning"),
             *negative = holder("negative");
  if (positive) graph.set_text("prompt", graph.input(*positive, "positive"));
  if (basic) graph.set_text("prompt", graph.input(*basic, "conditioning"));
  if (negative) graph.set_text("negative_prompt", graph.input(*negative, "negative"));
  if (const std::string latent = graph.link(graph.input(graph.node(first), "latent_image")); !latent.empty())
    for (const auto& [name, key] :
         {std::pair{"width", "width"}, {"height", "height"}, {"batch_size", "num_images_per_prompt"}}) {
      const json& its = graph.node(latent);
      if (graph.input(its, "width").is_null()) break;
      graph.mark_read(latent);
      if (const json node_value = graph.value(its, name); node_value.is_number_integer())
        s.keys[key] = dump_json(node_value);
    }
  const std::set<std::string> without_settings = {"VAEDecode", "SaveImage", "PreviewImage"};
  for (const auto& [id, node] : nodes.items()) {
    if (graph.was_read(id) || !node.is_object()) continue;
    const json name = node.value("class_type", json());
    if (name.is_string() && !without_settings.contains(name.get<std::string>()))
      s.unused.push_back("node " + shortened(name.get<std::string>(), 40));
  }
  return s;
}

std::optional<ForeignSettings> foreign_settings(const std::map<std::string, std::string>& texts,
                                                const std::string& image) {
  if (const auto web_ui = texts.find("parameters"); web_ui != texts.end()) {
    check(!parse_json_or_discard(web_ui->second).is_object(), Code::io,
          "'{}': its text `parameters` is JSON, as SwarmUI and Fooocus write it; expected the web UI's text: a prompt, "
          "and a line with 'Steps: …'",
          image);
    return settings_of_web_ui(web_ui->second);
  }
  if (const auto graph = texts.find("prompt"); graph != texts.end()) return settings_of_comfyui(graph->second, image);
  return std::nullopt;
}

}  // namespace md
