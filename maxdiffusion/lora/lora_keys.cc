#include "maxdiffusion/lora/lora_keys.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/split_at_commas.h"
#include "maxdiffusion/storage/hub_cache.h"

namespace md {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kFileName = "pytorch_lora_weights.safetensors";
constexpr const char* kPaths = "lora_model_name_or_path";
/// Fields for the first and the second denoiser.
constexpr const char* kOfDenoisers[] = {"high_noise_weight_name", "low_noise_weight_name"};
/// Ignored keys: adapter names, which merged files do not need, and ranks, which the files have.
constexpr const char* kFields[] = {kPaths,         "weight_name", kOfDenoisers[0], kOfDenoisers[1],
                                   "adapter_name", "rank",        "scale",         "from_pt"};

/// The file that a folder means: diffusers' or PEFT's name, else its only one.
std::string file_in(const std::string& folder) {
  for (const char* name : {kFileName, "adapter_model.safetensors"})
    if (fs::exists(folder + "/" + name)) return folder + "/" + name;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  if (names.size() > 1)
    throw Error(Code::invalid_config, fmt::format("LoRA '{}' is a folder with {} .safetensors files: {}; expected one",
                                                  folder, names.size(), fmt::join(names, ", ")))
        .note(fmt::format("try: the name of one of them, as {}/{}", folder, names[0]));
  return folder + "/" + (names.empty() ? kFileName : names[0]);
}

std::string file_of(std::string path, const std::string& weight_name) {
  if (!fs::exists(path) && fs::path(path).extension() != ".safetensors") path = local_folder(path);
  std::string file = path;
  if (fs::is_directory(path))
    file = weight_name.empty() ? file_in(path) : path + "/" + weight_name;
  else
    check(weight_name.empty() || fs::path(path).filename() == weight_name, Code::invalid_config,
          "LoRA '{}' is not a folder that holds weight_name '{}'", path, weight_name);
  check(fs::path(file).extension() == ".safetensors" || !fs::exists(file), Code::invalid_config,
        "LoRA '{}' is not a .safetensors file; pickled ones are not read, convert it with diffusers", file);
  check(fs::exists(file), Code::io,
        "LoRA '{}' does not exist; it must be a local .safetensors file or a folder with {}", file, kFileName);
  return file;
}

/// One field of lora_config as a list as long as the paths; empty: all `fallback`.
std::vector<json> field(const LoraKeys& keys, const char* name, size_t count, const json& fallback) {
  auto it = keys.lora_config.find(name);
  json list = it == keys.lora_config.end() ? json() : parse_json(it->second);
  if (list.is_null() || list.empty()) return std::vector<json>(count, fallback);
  check(list.is_array(), Code::invalid_config, "lora_config: {} is {}, expected a list", name, list.dump());
  check(list.size() == count, Code::invalid_config, "lora_config: {} has {} entries, {} has {}", name, list.size(),
        kPaths, count);
  return list.get<std::vector<json>>();
}

std::string text(const char* name, const json& v) {
  check(v.is_string() || v.is_null(), Code::invalid_config, "lora_config: {} holds {}, expected texts", name, v.dump());
  return v.is_null() ? "" : v.get<std::string>();
}

/// Lists of numbers with commas, one for each of `files` files: those of a single file may be apart.
std::vector<std::string> lists_of_files(const std::vector<std::string>& texts, size_t files) {
  std::vector<std::string> out;
  if (texts.empty()) return out;
  const std::string all = fmt::format("{}", fmt::join(texts, files == 1 ? "," : ";"));
  for (size_t at = 0, end = 0; end != all.npos; at = end + 1) {
    end = all.find(';', at);
    out.push_back(all.substr(at, end - at));
  }
  return out;
}

}  // namespace

MissingKeys missing_keys(const std::string& value) {
  return value == kMissingKeys[1] ? MissingKeys::left_out : MissingKeys::refused;
}

std::string lora_file(const std::string& path) { return file_of(path, ""); }

std::string text_of_files(const LoraKeys& k) {
  return fmt::format("{}\n{}\n{}\n{}\n{}\n{}", fmt::join(k.lora_files, "\n"), fmt::join(k.lora_scales, " "),
                     fmt::join(k.lora_text_scales, " "), fmt::join(k.lora_block_weights, ";"),
                     fmt::join(k.lora_steps, ","), k.lora_missing_keys);
}

std::vector<LoraChoice> chosen_loras(const LoraKeys& given_keys) {
  LoraKeys keys = given_keys;
  if (!keys.enable_lora) keys.lora_config.clear();
  std::vector<LoraChoice> out;
  for (const auto& [name, value] : keys.lora_config)
    check(std::ranges::count(kFields, name) > 0, Code::invalid_config,
          "lora_config: unknown field '{}'; expected one of: {}", name, fmt::join(kFields, ", "));
  if (!keys.lora_config.empty()) {
    auto paths_field = keys.lora_config.find(kPaths);
    const json paths = paths_field == keys.lora_config.end() ? json::array() : parse_json(paths_field->second);
    check(paths.is_array(), Code::invalid_config, "lora_config: {} is {}, expected a list", kPaths, paths.dump());
    const size_t n = paths.size();
    const auto names = field(keys, "weight_name", n, ""), scales = field(keys, "scale", n, 1.0),
               torch = field(keys, "from_pt", n, true);
    // Fields of MaxDiffusion without effect: files are merged in order, with the ranks of their matrices.
    for (const json& v : field(keys, "adapter_name", n, "")) text("adapter_name", v);
    for (const json& v : field(keys, "rank", n, 0))
      check(v.is_null() || (v.is_number_integer() && v.get<int64_t>() >= 0), Code::invalid_config,
            "lora_config: rank holds {}, expected whole numbers", v.dump());
    for (const char* name : {"adapter_name", "rank"})
      if (n > 0 && keys.lora_config.contains(name))
        log_info_once(
            "lora_config: {} is ignored: the rank is that of the file's matrices, and files are identified by their "
            "order",
            name);
    const bool apart = std::ranges::any_of(kOfDenoisers, [&](auto key) { return keys.lora_config.contains(key); });
    for (size_t i = 0; i < n; ++i) {
      check(scales[i].is_number(), Code::invalid_config, "lora_config: scale holds {}, expected numbers",
            scales[i].dump());
      std::string is_torch = torch[i].is_string() ? torch[i].get<std::string>() : torch[i].dump();
      std::ranges::transform(is_torch, is_torch.begin(), [](unsigned char c) { return std::tolower(c); });
      check(is_torch == "true", Code::invalid_config,
            "lora_config: from_pt holds {}; only true is supported: files are in PyTorch's layout", torch[i].dump());
      const std::string path = text(kPaths, paths[i]), name = text("weight_name", names[i]);
      const double scale = scales[i].get<double>();
      if (!apart) {
        out.push_back({file_of(path, name), scale});
        continue;
      }
      check(name.empty(), Code::invalid_config, "lora_config: weight_name holds '{}' and {}", name,
            fmt::join(kOfDenoisers, " and "));
      for (size_t d = 0; d < std::size(kOfDenoisers); ++d) {
        const std::string file_name = text(kOfDenoisers[d], field(keys, kOfDenoisers[d], n, "")[i]);
        if (file_name.empty())
          log_info("LoRA '{}': {} is empty, so that denoiser gets none", path, kOfDenoisers[d]);
        else
          out.push_back({file_of(path, file_name), scale, d});
      }
    }
  }
  const std::vector<std::string> files = split_paths(keys.lora_files);
  const auto check_count = [&](const char* key, size_t n) {
    check(n == 0 || n == files.size(), Code::invalid_config,
          "{} is for {} {}; expected {}, as many as lora_files names", key, n, n == 1 ? "file" : "files", files.size());
  };
  check_count("lora_scales", keys.lora_scales.size());
  check_count("lora_text_scales", keys.lora_text_scales.size());
  const auto each = [&](const char* key, const std::vector<std::string>& texts) {
    check_count(key, texts.size());
    return texts.empty() ? std::vector<std::string>(files.size()) : texts;
  };
  const auto weights = each("lora_block_weights", lists_of_files(keys.lora_block_weights, files.size())),
             steps = each("lora_steps", split_at_commas(keys.lora_steps));
  for (size_t i = 0; i < files.size(); ++i) {
    const auto range = read_step_range(steps[i]);
    check(range.has_value(), Code::invalid_config,
          "lora_steps: '{}' is no range of steps; expected one, as in 5-10, 0.2-0.8, 10- or -10", steps[i]);
    out.push_back({.path = lora_file(files[i]),
                   .scale = keys.lora_scales.empty() ? 1 : keys.lora_scales[i],
                   .text_scale = keys.lora_text_scales.empty() ? std::nullopt : std::optional(keys.lora_text_scales[i]),
                   .block_weights = weights[i],
                   .steps = *range});
  }
  for (const LoraChoice& c : out)
    for (const double scale : {c.scale, c.text_scale.value_or(0)})
      check(std::isfinite(scale), Code::invalid_config, "the scale of LoRA '{}' is {}", c.path, scale);
  return out;
}

namespace {

/// The entries of rank_pattern or alpha_pattern: numbers above 0.
template <class T>
std::vector<std::pair<LayerPattern, T>> patterns(const char* key, const std::map<std::string, std::string>& map) {
  std::vector<std::pair<LayerPattern, T>> out;
  for (const auto& [pattern, text] : map) {
    const json value = parse_json_or_discard(text);
    const bool fits = std::is_integral_v<T> ? value.is_number_integer() : value.is_number();
    check(fits && value.get<double>() > 0, Code::invalid_config, "{}: '{}' is {}; expected a {} above 0", key, pattern,
          text, std::is_integral_v<T> ? "whole number" : "number");
    try {
      out.emplace_back(LayerPattern(pattern), value.get<T>());
    } catch (const std::regex_error& e) {
      fail(Code::invalid_config, "{}: '{}' is no regular expression: {}", key, pattern, e.what());
    }
  }
  return out;
}

}  // namespace

LoraConfig training_lora(const LoraKeys& keys, const std::vector<std::string>& targets) {
  LoraConfig c{.rank = keys.lora_rank,
               .alpha = keys.lora_alpha.value_or(static_cast<double>(keys.lora_rank)),
               .targets = split_at_commas(keys.lora_target_modules),
               .kind = &adapter_named(keys.adapter),
               .ranks = patterns<int64_t>("rank_pattern", keys.rank_pattern),
               .alphas = patterns<double>("alpha_pattern", keys.alpha_pattern),
               .conv_rank = keys.conv_dim.value_or(0),
               .conv_alpha = keys.conv_alpha.value_or(static_cast<double>(keys.conv_dim.value_or(0))),
               .rank_stabilized = keys.use_rslora,
               .factor = keys.decompose_factor,
               .decompose_both = keys.decompose_both,
               .input_scaled = split_at_commas(keys.feedforward_modules),
               .input_dropout = keys.lora_dropout,
               .rank_dropout = keys.rank_dropout,
               .module_dropout = keys.module_dropout};
  check(c.rank > 0, Code::invalid_config, "lora_rank {} is not a positive number", c.rank);
  check(std::isfinite(c.alpha) && c.alpha > 0, Code::invalid_config, "lora_alpha {} is not a positive number", c.alpha);
  check(c.factor == -1 || c.factor > 0, Code::invalid_config, "decompose_factor is {}; expected -1 or 1 and more",
        c.factor);
  const auto refuse = [&](bool set, const char* key, const char* needed) {
    check(!set, Code::invalid_config, "{} cannot be combined with adapter={}: {}", key, keys.adapter, needed);
  };
  refuse(c.input_dropout > 0 && !c.kind->drops_input(), "lora_dropout", "nothing is added to a layer's result");
  refuse(c.rank_dropout > 0 && !c.kind->drops_rank(), "rank_dropout", "it has no rank");
  for (const auto& [set, key] : {std::pair{keys.use_rslora, "use_rslora"},
                                 {!c.ranks.empty(), "rank_pattern"},
                                 {!c.alphas.empty(), "alpha_pattern"},
                                 {keys.conv_dim.has_value(), "conv_dim"}})
    refuse(set && !c.kind->has_rank(), key, "it has no rank");
  refuse(keys.decompose_both && keys.adapter != "lokr", "decompose_both", "only lokr has Kronecker factors");
  refuse(keys.decompose_factor != -1 && keys.adapter != "lokr", "decompose_factor", "only lokr has Kronecker factors");
  refuse(!c.input_scaled.empty() && keys.adapter != "ia3", "feedforward_modules", "only ia3 scales a layer's input");
  check(!keys.conv_alpha || keys.conv_dim, Code::invalid_config, "conv_alpha is {}; expected conv_dim, too",
        keys.conv_alpha.value_or(0));
  if (c.targets.empty()) c.targets = targets;
  return c;
}

}  // namespace md
