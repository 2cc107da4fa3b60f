#include "maxdiffusion/lora/lora_file.h"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_metadata.h"

namespace md {
namespace {

constexpr size_t kListed = 20;  // keys told of each kind of trouble

enum class Part { down, up, alpha };

struct Ending {
  const char* text;
  Part part;
};
constexpr Ending kEndings[] = {
    {".lora_down.weight", Part::down},
    {".lora_up.weight", Part::up},
    {".lora_A.weight", Part::down},
    {".lora_B.weight", Part::up},
    {".lora.down.weight", Part::down},
    {".lora.up.weight", Part::up},
    {"_lora.down.weight", Part::down},
    {"_lora.up.weight", Part::up},
    {".lora_linear_layer.down.weight", Part::down},
    {".lora_linear_layer.up.weight", Part::up},
    {".alpha", Part::alpha},
};

struct Beginning {
  const char* text;
  const char* component;  // "": says nothing
};
constexpr Beginning kBeginnings[] = {
    {"base_model.model.", ""},         {"unet.", "unet"},
    {"text_encoder.", "text_encoder"}, {"text_encoder_2.", "text_encoder_2"},
    {"diffusion_model.", "unet"},      {"lora_unet_", "unet"},
    {"lora_te_", "text_encoder"},      {"lora_te1_", "text_encoder"},
    {"lora_te2_", "text_encoder_2"},
};

/// Parts of keys of methods that are not plain LoRA.
constexpr std::pair<const char*, const char*> kOtherMethods[] = {
    {".dora_scale", "DoRA"}, {".lora_magnitude_vector", "DoRA"},         {".hada_", "LoHa"}, {".lokr_", "LoKr"},
    {".oft_", "OFT"},        {".lora_mid.", "LoCon with a core tensor"},
};

struct Key {
  std::string component, module;  // component "": not said
  Part part;
};

/// "….lora_A.NAME.weight" → "….lora_A.weight": PEFT's own state holds the adapter's name.
std::string without_adapter_name(const std::string& key) {
  for (std::string_view matrix : {".lora_A.", ".lora_B."}) {
    const size_t at = key.find(matrix);
    if (at == key.npos) continue;
    const size_t name = at + matrix.size(), dot = key.find('.', name);
    if (dot != key.npos && key.substr(dot) == ".weight") return key.substr(0, name - 1) + ".weight";
  }
  return key;
}

std::optional<Key> understood(const std::string& text) {
  const std::string key = without_adapter_name(text);
  for (const Ending& e : kEndings) {
    if (!key.ends_with(e.text)) continue;
    Key k{.module = key.substr(0, key.size() - std::string_view(e.text).size()), .part = e.part};
    for (bool found = true; found;) {
      found = false;
      for (const Beginning& b : kBeginnings) {
        if (!k.module.starts_with(b.text) || (*b.component && !k.component.empty())) continue;
        k.module.erase(0, std::string_view(b.text).size());
        if (*b.component) k.component = b.component;
        found = true;
      }
    }
    const std::string processor = ".processor";
    if (const size_t at = k.module.find(processor); at != k.module.npos) k.module.erase(at, processor.size());
    return k;
  }
  return std::nullopt;
}

std::string listed(const std::vector<std::string>& keys) {
  const auto shown = std::min(keys.size(), kListed);
  auto text = fmt::format("{}", fmt::join(keys.begin(), keys.begin() + static_cast<long>(shown), ", "));
  if (shown < keys.size()) text += fmt::format(" and {} more", keys.size() - shown);
  return text;
}

/// The array with sizes of 1 added or removed at the end so that it has `rank` dims; as it is where that cannot be.
HostArray with_rank(const HostArray& a, size_t rank) {
  Dims d = a.dims();
  while (d.size() > rank && d.back() == 1) d.pop_back();
  if (d.size() >= 2) d.resize(std::max(rank, d.size()), 1);
  return a.reshaped(d);
}

struct Found {
  LoraPair pair;
  std::string module, down_key, up_key, alpha_key;
};

std::string module_of(const std::string& path) { return path.substr(0, path.size() - std::string(".weight").size()); }

}  // namespace

void check_fits(const LoraPair& pair, const Dims& dims, const std::string& name) {
  check(dims.size() >= 2, Code::io, "LoRA for {}: the weight is {}; only matrices and convolutions take one", name,
        to_string(dims));
  Dims down = dims, up = dims;
  const int64_t rank = pair.down.dims().empty() ? 0 : pair.rank();
  down[0] = rank;
  std::fill(up.begin() + 1, up.end(), 1);
  up[1] = rank;
  check(pair.down.dims() == down && pair.up.dims() == up, Code::io,
        "LoRA for {}: down is {} and up is {}, expected {} and {} for a weight of {}", name,
        to_string(pair.down.dims()), to_string(pair.up.dims()), to_string(down), to_string(up), to_string(dims));
}

LoraFile read_lora(const std::string& path, const LoraTargets& targets) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  const LoraMetadata metadata = LoraMetadata::read(path, file.metadata());
  std::map<const LoraTarget*, Found> found;
  std::vector<std::string> unread;
  for (const auto& [key, array] : file.tensors()) {
    for (const auto& [mark, method] : kOtherMethods)
      check(key.find(mark) == key.npos, Code::invalid_config, "LoRA '{}': key '{}' is of {}, which is not supported",
            path, key, method);
    const std::optional<Key> k = understood(key);
    const auto matches = k ? targets.find(k->component, k->module) : std::vector<const LoraTarget*>();
    if (matches.size() != 1 || !(is_float(array.dtype()) || k->part == Part::alpha)) {
      unread.push_back(key);
      continue;
    }
    Found& f = found[matches[0]];
    f.module = k->module;
    std::string& before = k->part == Part::down ? f.down_key : k->part == Part::up ? f.up_key : f.alpha_key;
    check(before.empty(), Code::io, "LoRA '{}': '{}' and '{}' are both for {} of {}", path, before, key,
          matches[0]->path, matches[0]->component);
    before = key;
    if (k->part == Part::alpha) {
      check(array.shape().elements() == 1, Code::io, "LoRA '{}': '{}' is {}, expected one number", path, key,
            to_string(array.shape()));
      f.pair.alpha = array.to_doubles()[0];
    } else {
      (k->part == Part::down ? f.pair.down : f.pair.up) = with_rank(array, matches[0]->dims.size());
    }
  }
  if (!unread.empty()) {
    Error e(Code::io, fmt::format("LoRA '{}': {} of {} keys have no place in this model", path, unread.size(),
                                  file.tensors().size()));
    e.note("unread: " + listed(unread));
    throw e.note(fmt::format("the model has: {}; is the file made for another model, or by a method other than LoRA?",
                             fmt::join(targets.components(), ", ")));
  }
  LoraFile lora{.name = path};
  for (auto& [target, f] : found) {
    const std::string name = fmt::format("{} of {} in '{}'", target->path, target->component, path);
    check(f.pair.down && f.pair.up, Code::io, "LoRA for {}: there is '{}' without its {} matrix", name,
          f.pair.down ? f.down_key
          : f.pair.up ? f.up_key
                      : f.alpha_key,
          f.pair.down ? "up" : "down");
    check_fits(f.pair, target->dims, name);
    check(f.pair.rank() > 0, Code::io, "LoRA for {}: the rank is 0", name);
    const bool said = metadata.covers(target->component);
    check(f.alpha_key.empty() || !said, Code::io, "LoRA for {}: alpha is said twice, by '{}' and by the metadata", name,
          f.alpha_key);
    if (said)
      f.pair.alpha = metadata.alpha(target->component, f.module, f.pair.rank());
    else if (f.pair.alpha_said = f.pair.alpha != 0; !f.pair.alpha_said)
      f.pair.alpha = static_cast<double>(f.pair.rank());
    check(std::isfinite(f.pair.alpha), Code::io, "LoRA for {}: alpha is {}", name, f.pair.alpha);
    lora.pairs[target->component].emplace(target->path, std::move(f.pair));
  }
  check(!lora.pairs.empty(), Code::io, "LoRA '{}' holds no matrices", path);
  return lora;
}

std::string write_peft_lora(const std::string& folder, const LoraFile& lora) {
  HostArrays arrays;
  std::map<std::string, std::map<std::string, LoraStrength>> strengths;
  for (const auto& [component, pairs] : lora.pairs)
    for (const auto& [path, pair] : pairs) {
      std::string module = module_of(path);
      arrays[component + "." + module + ".lora_A.weight"] = pair.down;
      arrays[component + "." + module + ".lora_B.weight"] = pair.up;
      // Names in the metadata are ends of names, which a text encoder has with and without this.
      const std::string optional = "text_model.";
      if (module.starts_with(optional)) module.erase(0, optional.size());
      strengths[component][module] = {pair.rank(), pair.alpha};
    }
  make_folders(folder);
  std::string path = folder + "/pytorch_lora_weights.safetensors";
  write_safetensors(path, arrays, {{"format", "pt"}, {"lora_adapter_metadata", lora_metadata_json(strengths)}});
  return path;
}

void write_kohya_lora(const std::string& path, const LoraFile& lora, bool two_text_encoders) {
  const std::map<std::string, std::string> beginnings = {{"unet", "lora_unet_"},
                                                         {"text_encoder", two_text_encoders ? "lora_te1_" : "lora_te_"},
                                                         {"text_encoder_2", "lora_te2_"}};
  HostArrays arrays;
  for (const auto& [component, pairs] : lora.pairs) {
    auto begin = beginnings.find(component);
    check(begin != beginnings.end(), Code::invalid_config, "kohya's layout has no name for LoRA matrices of {}",
          component);
    for (const auto& [weight, pair] : pairs) {
      const std::string name = begin->second + underscored(module_of(weight));
      const float alpha = static_cast<float>(pair.alpha);
      arrays[name + ".lora_down.weight"] = pair.down;
      arrays[name + ".lora_up.weight"] = pair.up;
      arrays[name + ".alpha"] = HostArray::of<float>({DType::f32, {}}, {&alpha, 1});
    }
  }
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  if (!parent.empty()) make_folders(parent.string());
  write_safetensors(path, arrays);
}

}  // namespace md
