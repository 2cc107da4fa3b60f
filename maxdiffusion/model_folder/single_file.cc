#include "maxdiffusion/model_folder/single_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weight_format.h"
#include "maxdiffusion/model_folder/match_weights.h"

namespace md {

std::vector<SingleFileLayout> stable_diffusion_layouts();
std::vector<SingleFileLayout> transformer_layouts();

namespace {

const std::vector<SingleFileLayout>& layouts() {
  static const std::vector<SingleFileLayout> all = [] {
    std::vector<SingleFileLayout> both = stable_diffusion_layouts();
    std::ranges::move(transformer_layouts(), std::back_inserter(both));
    return both;
  }();
  return all;
}

/// Names as "model_ema.* (686), betas, logvar": more than three with the same prefix are summarized.
std::string in_groups(const std::vector<std::string>& names) {
  std::map<std::string, std::vector<std::string>> groups;
  for (const std::string& n : names) groups[n.substr(0, n.find('.'))].push_back(n);
  std::vector<std::string> texts;
  for (const auto& [beginning, members] : groups)
    texts.push_back(members.size() > 3 ? fmt::format("{}.* ({})", beginning, members.size())
                                       : fmt::format("{}", fmt::join(members, ", ")));
  return fmt::format("{}", fmt::join(texts, ", "));
}

}  // namespace

const SingleFileLayout& find_single_file_layout(const std::string& file, const HostArrays& tensors) {
  for (const SingleFileLayout& l : layouts())
    if (l.is_of(tensors)) return l;
  std::vector<std::string> names, first;
  for (const SingleFileLayout& l : layouts()) names.push_back(l.name);
  for (const auto& [name, tensor] : tensors)
    if (first.size() < 3) first.push_back(name);
  Error e(Code::invalid_config,
          fmt::format("'{}' is not a file of a whole model in the original layout of {}; its {} tensors begin with: {}",
                      file, fmt::join(names, ", "), tensors.size(), fmt::join(first, ", ")));
  throw e.note(
      "try: with a folder as pretrained_model_name_or_path, a file of one model replaces the folder's: "
      "unet_checkpoint, "
      "vae_file, wan_transformer_pretrained_model_name_or_path, controlnet_model_name_or_path; LoRA files are "
      "lora_files");
}

std::set<std::string> check_single_file(const ModelFolder& folder, const SingleFileLayout& layout,
                                        const SafetensorsReader& file) {
  std::set<std::string> used, absent;
  std::vector<std::string> unneeded = layout.unneeded;
  LoadOptions options;
  options.matched = &used;
  for (const auto& [name, component] : folder.components()) {
    if (component.weights != folder.path()) continue;
    const WeightNameMap names = weight_names(component);
    unneeded.insert(unneeded.end(), names.unneeded.begin(), names.unneeded.end());
    const size_t before = used.size();
    try {
      match_weights(name, component, file, folder.path(), options);
    } catch (const Error& e) {
      if (used.size() == before) {
        absent.insert(name);
        continue;
      }
      if (!component.config_file.starts_with(folder.path())) throw;  // names single_file_config's file
      Error first(e.code(), fmt::format("'{}' is recognized as {}, but its {} does not have the published sizes",
                                        folder.path(), layout.name, name));
      first.note(
          "try: single_file_config=FOLDER, a model folder in diffusers' layout with its configs, such as the one that "
          "the "
          "file was converted from");
      first.note(e.message());
      for (const std::string& note : e.notes())
        if (note.find(component.config_file) == note.npos) first.note(note);  // names no missing file
      throw first;
    }
  }
  std::vector<std::string> left, unknown;
  for (const auto& [name, tensor] : file.tensors()) {
    if (used.contains(name) || name == kVelocityMark || name == kZeroSnrMark || is_format_extra(name)) continue;
    const bool known =
        std::ranges::any_of(unneeded, [&n = name](const std::string& beginning) { return n.starts_with(beginning); }) ||
        std::ranges::any_of(options.ignorable, [&n = name](const std::string& end) { return n.ends_with(end); });
    (known ? left : unknown).push_back(name);
  }
  check(unknown.empty(), Code::io,
        "'{}' is recognized as {}; {} of its tensors are not part of it: {}; they may belong to a method that is not "
        "supported",
        folder.path(), layout.name, unknown.size(), in_groups(unknown));
  log_info("{}: {}{}", folder.path(), layout.name, left.empty() ? "" : "; not read: " + in_groups(left));
  return absent;
}

std::string control_config(const ModelFolder& folder, const std::string& file) {
  const HostArrays tensors = SafetensorsReader::open(file).tensors();
  for (const auto& [mark, kind] : {std::pair{"lora_controlnet", "Control-LoRA"}, {"lllite_", "ControlNet-LLLite"}})
    if (const auto found = tensors.lower_bound(mark); found != tensors.end() && found->first.starts_with(mark))
      throw Error(Code::invalid_config,
                  fmt::format("'{}' is a {} (it has the tensor {}), which is not supported; expected a ControlNet",
                              file, kind, found->first))
          .note("try: the whole ControlNet that it was made from, in controlnet_model_name_or_path");
  const std::string config_file = (std::filesystem::path(file).parent_path() / "config.json").string();
  if (exists(config_file)) return read_file(config_file);
  /// The first of these tensors that exists, without or with the original program's prefix.
  auto weight = [&](std::initializer_list<std::string> names) -> const HostArray* {
    for (const char* prefix : {"", "control_model."})
      for (const std::string& name : names)
        if (const auto found = tensors.find(prefix + name + ".weight"); found != tensors.end()) return &found->second;
    return nullptr;
  };
  const HostArray* first = weight({"controlnet_cond_embedding.conv_in", "input_hint_block.0"});
  check(first && first->dims().size() == 4, Code::invalid_config,
        "'{}' is not a file of a ControlNet: it has neither controlnet_cond_embedding.conv_in.weight nor "
        "input_hint_block.0.weight",
        file);
  std::vector<int64_t> widths = {first->dims()[0]};
  for (int64_t k = 1;; k += 2) {  // every second convolution halves the image and changes the width
    const HostArray* next =
        weight({fmt::format("controlnet_cond_embedding.blocks.{}", k), fmt::format("input_hint_block.{}", 2 * k + 2)});
    if (!next) break;
    widths.push_back(next->dims()[0]);
  }
  nlohmann::json config = parse_json(folder.files().at("unet/config.json"));
  for (const char* of_the_unet : {"up_block_types", "out_channels", "sample_size", "time_cond_proj_dim"})
    config.erase(of_the_unet);
  config["_class_name"] = "ControlNetModel";
  config["conditioning_channels"] = first->dims()[1];
  config["conditioning_embedding_out_channels"] = widths;
  return config.dump(2) + "\n";
}

}  // namespace md
