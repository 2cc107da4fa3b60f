#include "maxdiffusion/lora/lora_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_metadata.h"

namespace md {
namespace {

constexpr size_t kListed = 20;  // keys listed for each kind of error

enum class Part { down, up, alpha, weight, bias, modulation };

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
    {".down.weight", Part::down},
    {".up.weight", Part::up},
    {".alpha", Part::alpha},
    {".diff", Part::weight},
    {".diff_b", Part::bias},
    {".diff_m", Part::modulation},
};

constexpr const char* kDenoiser = "*";  // whichever is meant
constexpr std::pair<const char*, const char*> kBeginnings[] = {{"diffusion_model.", kDenoiser},
                                                               {"lora_unet_", kDenoiser},
                                                               {"lora_transformer_", kDenoiser},
                                                               {"lora_te_", "text_encoder"},
                                                               {"lora_te1_", "text_encoder"},
                                                               {"lora_te2_", "text_encoder_2"},
                                                               {"lora_te3_", "text_encoder_2"},
                                                               {"text_encoders.clip_l.transformer.", "text_encoder"},
                                                               {"text_encoders.t5xxl.transformer.", "text_encoder_2"}};

/// Parts of keys of methods that are not plain LoRA.
constexpr std::pair<const char*, const char*> kOtherMethods[] = {
    {".dora_scale", "DoRA"}, {".lora_magnitude_vector", "DoRA"},         {".hada_", "LoHa"}, {".lokr_", "LoKr"},
    {".oft_", "OFT"},        {".lora_mid.", "LoCon with a core tensor"},
};

struct Key {
  std::string component, module;  // component "": none
  Part part;
};

/// A key of the safetensors metadata: the component whose matrices a file of one denoiser of several holds.
constexpr const char* kComponent = "component";

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

/// Throws invalid_config for keys of methods that are not plain LoRA.
void check_method(const std::string& path, const std::string& key) {
  for (const auto& [mark, method] : kOtherMethods)
    check(key.find(mark) == key.npos, Code::invalid_config, "LoRA '{}': key '{}' is of {}, which is not supported",
          path, key, method);
}

/// Null where no ending is known.
const Ending* ending_of(const std::string& key) {
  const auto end = std::ranges::find_if(kEndings, [&](const Ending& e) { return key.ends_with(e.text); });
  return end == std::end(kEndings) ? nullptr : end;
}

std::optional<Key> understood(const std::string& text, const LoraTargets& targets) {
  const std::string key = without_adapter_name(text);
  std::vector<std::pair<std::string, std::string>> beginnings(std::begin(kBeginnings), std::end(kBeginnings));
  for (const std::string& c : targets.components())
    beginnings.emplace_back(c + ".", c == targets.denoisers().front() ? kDenoiser : c);
  const Ending* end = ending_of(key);
  if (!end) return std::nullopt;
  Key k{.module = key.substr(0, key.size() - std::string_view(end->text).size()), .part = end->part};
  auto strip = [&](const std::string& beginning) {
    const bool found = k.module.starts_with(beginning);
    if (found) k.module.erase(0, beginning.size());
    return found;
  };
  for (bool found = true; found;) {
    found = strip("base_model.model.");
    for (const auto& [beginning, component] : beginnings)
      if (k.component.empty() && strip(beginning)) found = true, k.component = component;
  }
  const std::string processor = ".processor";
  if (const size_t at = k.module.find(processor); at != k.module.npos) k.module.erase(at, processor.size());
  return k;
}

/// The parameters that a key is for; may be none.
std::vector<LoraPlace> places_of(const Key& k, const LoraTargets& targets, const std::string& denoiser) {
  auto find = [&](const std::string& name) {
    return targets.find(k.component == kDenoiser ? denoiser : k.component, name, denoiser);
  };
  switch (k.part) {
    case Part::bias: return find(k.module + ".bias");
    case Part::weight:
    case Part::modulation: {
      std::vector<LoraPlace> places = find(k.module + (k.part == Part::weight ? ".weight" : ".modulation"));
      return places.empty() ? find(k.module) : places;
    }
    default: {
      std::vector<LoraPlace> places = find(k.module + ".weight");
      std::erase_if(places, [](const LoraPlace& p) { return p.target->dims.size() < 2; });
      return places;
    }
  }
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

/// A matrix as its target's dims want it.
HostArray fitted(const HostArray& a, Part part, const Dims& dims) {
  Dims down = dims;
  if (part == Part::down && a.dims().size() == 2) {
    down[0] = a.dims()[0];
    if (Shape{a.dtype(), down}.elements() == a.shape().elements()) return a.reshaped(down);
  }
  return with_rank(a, dims.size());
}

Dims without_ones(Dims d) {
  std::erase(d, 1);
  return d;
}

struct Found {
  LoraPair pair;
  std::string module, down_key, up_key, alpha_key;
  std::string said;  // the component as the file's metadata calls it
  bool is_part = false;
};

/// The rows of a file's array that are a target's.
HostArray rows_for(const LoraPlace& place, const HostArray& a, const std::string& path, const std::string& key) {
  if (place.parts == 1) return a;
  const int64_t part = place.target->dims[0] / std::ssize(place.part);
  check(!a.dims().empty() && a.dims()[0] == part * place.parts, Code::io,
        "LoRA '{}': '{}' is {}; expected {} rows, {} of which are for {} of {}", path, key, to_string(a.dims()),
        part * place.parts, place.target->dims[0], place.target->path, place.target->component);
  return select_parts(a, place.part, place.parts);
}

/// The columns of `up` between which all others are zeros: the first, and one past the last.
std::pair<int64_t, int64_t> columns_in_use(const HostArray& up) {
  const int64_t out = up.dims()[0], rank = up.dims()[1];
  const auto size = up.bytes() / static_cast<size_t>(out * rank);
  int64_t first = rank, end = 0;
  for (int64_t i = 0; i < out * rank; ++i) {
    const std::byte* element = up.data() + static_cast<size_t>(i) * size;
    if (std::all_of(element, element + size, [](std::byte b) { return b == std::byte{0}; })) continue;
    first = std::min(first, i % rank);
    end = std::max(end, i % rank + 1);
  }
  return {first, end};
}

/// Matrices of several weights side by side may each have a share of the rank to themselves: of those of one, that
/// share is kept, and alpha / rank stays what it is. Of weights whose share is empty, nothing.
void keep_own_ranks(std::map<const LoraTarget*, Found>& found) {
  std::map<std::string, std::vector<std::pair<const LoraTarget*, std::pair<int64_t, int64_t>>>> used;  // by up_key
  for (const auto& [target, f] : found)
    if (f.is_part && f.pair.up.dims().size() >= 2 && f.pair.up.shape().elements() > 0)
      used[f.up_key].emplace_back(target, columns_in_use(f.pair.up));
  for (const auto& [key, parts] : used) {
    if (std::ranges::all_of(parts, [](const auto& p) { return p.second.second == 0; })) continue;
    for (const auto& [target, columns] : parts) {
      const auto [first, end] = columns;
      LoraPair& pair = found.at(target).pair;
      if (end == 0) {
        found.erase(target);
      } else if (const int64_t rank = pair.rank(); end - first < rank) {
        pair.down = rows(pair.down, first, end - first);
        pair.up = block(pair.up, 0, pair.up.dims()[0], first, end - first);
        pair.alpha *= static_cast<double>(end - first) / static_cast<double>(rank);
      }
    }
  }
}

/// The default denoiser of names without a component.
std::string meant_denoiser(const SafetensorsReader& file, const LoraTargets& targets, const std::string& asked) {
  if (!asked.empty()) return asked;
  const auto said = file.metadata().find(kComponent);
  const bool known = said != file.metadata().end() && std::ranges::count(targets.denoisers(), said->second) > 0;
  return known ? said->second : targets.denoisers().front();
}

/// The one denoiser that the file has matrices for, where it is not the first; else empty.
std::string other_denoiser(const LoraFile& lora, const LoraNames& names) {
  std::string only;
  for (const std::string& d : names.denoisers) {
    if (!lora.pairs.contains(d)) continue;
    if (!only.empty() || d == names.denoisers.front()) return "";
    only = d;
  }
  return only;
}

using Metadata = std::map<std::string, std::string>;
Metadata metadata_of(const LoraFile& lora, const LoraNames& names) {
  const std::string other = other_denoiser(lora, names);
  return other.empty() ? Metadata() : Metadata{{kComponent, other}};
}

HostArray number(double v) {
  const float f = static_cast<float>(v);
  return HostArray::of<float>({DType::f32, {}}, {&f, 1});
}

std::string module_of(const std::string& path) { return path.substr(0, path.size() - std::string(".weight").size()); }

using Pairs = std::map<std::string, LoraPair>;

/// A weight's matrices, and where in another program's tensor the weight is.
struct Member {
  WeightAlias at;
  const LoraPair* pair;
};

double strength(const LoraPair& p) { return p.alpha / static_cast<double>(p.rank()); }

HostArray times(const HostArray& a, double factor) {
  if (factor == 1) return a;
  const HostArray from = a.cast(DType::f32);
  HostArray out(from.shape());
  std::ranges::transform(from.view<float>(), out.mutable_view<float>().begin(),
                         [factor](float v) { return static_cast<float>(v * factor); });
  return out.cast(a.dtype());
}

/// Matrices of one tensor from those of weights that are parts of it: each has a share of the rank to itself, and zeros
/// elsewhere. alpha / rank is what they have in common, else 1.
LoraPair side_by_side(const std::vector<Member>& members) {
  int64_t rank = 0;
  bool same = true;
  const LoraPair& first = *members.front().pair;
  for (const Member& m : members) {
    check(m.pair->down.dtype() == first.down.dtype() && m.pair->up.dtype() == first.up.dtype(), Code::invalid_config,
          "LoRA: the matrices of the parts of '{}' are of different types", m.at.name);
    rank += m.pair->rank();
    same &= strength(*m.pair) == strength(first);
  }
  auto zeros = [](DType type, Dims dims) { return zeros_like(HostArray(Shape{type, std::move(dims)})); };
  Dims down = first.down.dims(), up = first.up.dims();
  down[0] = up[1] = rank;
  up[0] = up[0] / std::ssize(members.front().at.part) * members.front().at.parts;
  LoraPair out{.down = zeros(first.down.dtype(), down),
               .up = zeros(first.up.dtype(), up),
               .alpha = static_cast<double>(rank) * (same ? strength(first) : 1)};
  int64_t at = 0;
  for (const Member& m : members) {
    set_rows(out.down, at, m.pair->down);
    Dims own = up;
    own[0] = m.pair->up.dims()[0];
    HostArray wide = zeros(first.up.dtype(), own);
    set_block(wide, 0, at, times(m.pair->up, same ? 1 : strength(*m.pair)));
    set_parts(out.up, m.at.part, m.at.parts, wide);
    at += m.pair->rank();
  }
  return out;
}

/// Module → matrices in other layouts: if original files hold only this model, by its names and with its tensors; else
/// by the published names.
Pairs for_other_programs(const std::string& component, const Pairs& pairs, const LoraNames& names) {
  const auto others = names.others.find(component);
  Pairs out;
  std::map<std::string, std::vector<Member>> parts;
  for (const auto& [weight, pair] : pairs) {
    std::vector<WeightAlias> all;
    if (others != names.others.end() && others->second.of) all = others->second.of(weight);
    if (all.empty() || !all.front().prefix.empty())
      out[module_of(weight)] = pair;
    else if (all.front().parts == 1)
      out[module_of(all.front().name)] = pair;
    else
      parts[module_of(all.front().name)].push_back({all.front(), &pair});
  }
  for (auto& [module, members] : parts) {
    std::ranges::sort(members, {}, [](const Member& m) { return m.at.part; });
    out[module] = side_by_side(members);
  }
  return out;
}

}  // namespace

std::string summary(const LoraFile& lora) {
  std::vector<std::string> parts;
  for (const auto& [component, pairs] : lora.pairs)
    parts.push_back(fmt::format("{} pairs of matrices of {}", pairs.size(), component));
  for (const auto& [component, arrays] : lora.differences)
    parts.push_back(fmt::format("{} differences of {}", arrays.size(), component));
  return fmt::format("{}", fmt::join(parts, ", "));
}

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

LoraFile read_lora(const std::string& path, const LoraTargets& targets, const std::string& denoiser) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  const LoraMetadata metadata = LoraMetadata::read(path, file.metadata());
  const std::string first = targets.denoisers().front(), meant = meant_denoiser(file, targets, denoiser);
  LoraFile lora{.name = path};
  std::map<const LoraTarget*, Found> found;
  std::map<const LoraTarget*, std::string> difference_keys;
  std::vector<std::string> unread;
  for (const auto& tensor : file.tensors()) {
    const std::string& key = tensor.first;
    const HostArray& array = tensor.second;
    check_method(path, key);
    const std::optional<Key> k = understood(key, targets);
    const std::vector<LoraPlace> places = k ? places_of(*k, targets, meant) : std::vector<LoraPlace>();
    if (places.empty() || !(is_float(array.dtype()) || k->part == Part::alpha)) {
      unread.push_back(key);
      continue;
    }
    for (const LoraPlace& place : places) {
      const LoraTarget* target = place.target;
      auto only = [&](std::string& before) {
        check(before.empty(), Code::io, "LoRA '{}': '{}' and '{}' are both for {} of {}", path, before, key,
              target->path, target->component);
        before = key;
      };
      if (k->part == Part::weight || k->part == Part::bias || k->part == Part::modulation) {
        only(difference_keys[target]);
        const HostArray own = rows_for(place, array, path, key);
        check(without_ones(own.dims()) == without_ones(target->dims), Code::io,
              "LoRA '{}': '{}' is {}, but {} of {} is {}", path, key, to_string(array.dims()), target->path,
              target->component, to_string(target->dims));
        lora.differences[target->component][target->path] = own.reshaped(target->dims);
        continue;
      }
      Found& f = found[target];
      f.module = k->module;
      f.said = target->component == meant && k->component != meant ? first : target->component;
      f.is_part = place.parts > 1;
      only(k->part == Part::down ? f.down_key : k->part == Part::up ? f.up_key : f.alpha_key);
      if (k->part == Part::alpha) {
        check(array.shape().elements() == 1, Code::io, "LoRA '{}': '{}' is {}, expected one number", path, key,
              to_string(array.shape()));
        f.pair.alpha = array.to_doubles()[0];
      } else if (k->part == Part::down) {
        f.pair.down = fitted(array, k->part, target->dims);
      } else {
        f.pair.up = fitted(rows_for(place, array, path, key), k->part, target->dims);
      }
    }
  }
  if (!unread.empty()) {
    Error e(Code::io, fmt::format("LoRA '{}': {} of {} keys have no place in this model", path, unread.size(),
                                  file.tensors().size()));
    e.note("unread: " + listed(unread));
    throw e.note(fmt::format("the model has: {}; is the file made for another model, or by a method other than LoRA?",
                             fmt::join(targets.components(), ", ")));
  }
  for (auto& [target, f] : found) {
    const std::string name = fmt::format("{} of {} in '{}'", target->path, target->component, path);
    check(f.pair.down && f.pair.up, Code::io, "LoRA for {}: there is '{}' without its {} matrix", name,
          f.pair.down ? f.down_key
          : f.pair.up ? f.up_key
                      : f.alpha_key,
          f.pair.down ? "up" : "down");
    check_fits(f.pair, target->dims, name);
    check(f.pair.rank() > 0, Code::io, "LoRA for {}: the rank is 0", name);
    const bool said = metadata.covers(f.said);
    check(f.alpha_key.empty() || !said, Code::io, "LoRA for {}: alpha is given twice, by '{}' and by the metadata",
          name, f.alpha_key);
    if (said)
      f.pair.alpha = metadata.alpha(f.said, f.module, f.pair.rank());
    else if (f.pair.alpha_in_file = f.pair.alpha != 0; !f.pair.alpha_in_file)
      f.pair.alpha = static_cast<double>(f.pair.rank());
    check(std::isfinite(f.pair.alpha), Code::io, "LoRA for {}: alpha is {}", name, f.pair.alpha);
  }
  keep_own_ranks(found);
  for (auto& [target, f] : found) lora.pairs[target->component].emplace(target->path, std::move(f.pair));
  check(!lora.pairs.empty() || !lora.differences.empty(), Code::io, "LoRA '{}' holds no matrices", path);
  return lora;
}

std::string write_peft_lora(const std::string& folder, const LoraFile& lora, const LoraNames& names) {
  HostArrays arrays;
  std::map<std::string, std::map<std::string, LoraStrength>> strengths;
  Metadata metadata = metadata_of(lora, names);
  for (const auto& [component, pairs] : lora.pairs) {
    const bool other = metadata.contains(kComponent) && metadata.at(kComponent) == component;
    const std::string& said = other ? names.denoisers.front() : component;
    for (const auto& [path, pair] : pairs) {
      std::string module = module_of(path);
      arrays[said + "." + module + ".lora_A.weight"] = pair.down;
      arrays[said + "." + module + ".lora_B.weight"] = pair.up;
      // Names in the metadata are ends of names, which a text encoder has with and without this.
      const std::string optional = "text_model.";
      if (module.starts_with(optional)) module.erase(0, optional.size());
      strengths[said][module] = {pair.rank(), pair.alpha};
    }
  }
  metadata["format"] = "pt";
  metadata["lora_adapter_metadata"] = lora_metadata_json(strengths);
  make_folders(folder);
  std::string path = folder + "/pytorch_lora_weights.safetensors";
  write_safetensors(path, arrays, metadata);
  return path;
}

LoraContents read_lora_contents(const std::string& path) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  const LoraMetadata metadata = LoraMetadata::read(path, file.metadata());
  LoraContents out{.metadata = file.metadata()};
  std::map<std::string, NamedPair> pairs;
  for (const auto& [key, array] : file.tensors()) {
    check_method(path, key);
    const Ending* end = ending_of(without_adapter_name(key));
    if (!end || end->part > Part::alpha) {
      out.others[key] = array;
      continue;
    }
    const std::string plain = without_adapter_name(key),
                      module = plain.substr(0, plain.size() - std::string_view(end->text).size());
    NamedPair& p = pairs[module];
    p.module = module;
    if (end->part == Part::alpha) {
      check(array.shape().elements() == 1, Code::io, "LoRA '{}': '{}' is {}, expected one number", path, key,
            to_string(array.shape()));
      p.alpha_key = key, p.pair.alpha = array.to_doubles()[0];
    } else {
      (end->part == Part::down ? p.down_key : p.up_key) = key;
      (end->part == Part::down ? p.pair.down : p.pair.up) = array;
    }
  }
  for (auto& [module, p] : pairs) {
    check(p.pair.down && p.pair.up, Code::io, "LoRA '{}': {} lacks one of its two matrices", path, module);
    Dims weight = p.pair.down.dims();
    check(weight.size() >= 2 && p.pair.up.dims().size() >= 2, Code::io, "LoRA '{}': the matrices of {} are {} and {}",
          path, module, to_string(p.pair.down.dims()), to_string(p.pair.up.dims()));
    weight[0] = p.pair.up.dims()[0];
    p.pair.up = with_rank(p.pair.up, weight.size());
    check_fits(p.pair, weight, fmt::format("{} in '{}'", module, path));
    check(p.pair.rank() > 0, Code::io, "LoRA '{}': the rank of {} is 0", path, module);
    const size_t dot = module.find('.');
    const std::string component = dot == std::string::npos ? "" : module.substr(0, dot);
    if (p.alpha_key.empty() && metadata.covers(component))
      p.pair.alpha = metadata.alpha(component, module.substr(component.empty() ? 0 : dot + 1), p.pair.rank());
    else if (p.pair.alpha_in_file = p.pair.alpha != 0; !p.pair.alpha_in_file)
      p.pair.alpha = static_cast<double>(p.pair.rank());
    out.pairs.push_back(std::move(p));
  }
  check(!out.pairs.empty(), Code::io, "LoRA '{}' holds no pairs of matrices", path);
  return out;
}

void put_pair(const NamedPair& old, const LoraPair& pair, HostArrays& out) {
  out[old.down_key] = pair.down;
  out[old.up_key] = pair.up;
  if (!old.alpha_key.empty()) {
    out[old.alpha_key] = number(pair.alpha);
  } else if (const double factor = pair.alpha / static_cast<double>(pair.rank()); factor != 1) {
    out[old.up_key] = times(pair.up, factor);
  }
}

void write_kohya_lora(const std::string& path, const LoraFile& lora, const LoraNames& names, bool two_text_encoders,
                      const std::map<std::string, std::string>& more) {
  std::map<std::string, std::string> beginnings = {{"text_encoder", two_text_encoders ? "lora_te1_" : "lora_te_"},
                                                   {"text_encoder_2", "lora_te2_"}};
  Metadata metadata = metadata_of(lora, names);
  metadata.insert(more.begin(), more.end());
  beginnings[metadata.contains(kComponent) ? metadata.at(kComponent) : names.denoisers.front()] = "lora_unet_";
  HostArrays arrays;
  std::set<int64_t> ranks;
  std::set<double> alphas;
  for (const auto& [component, pairs] : lora.pairs) {
    auto begin = beginnings.find(component);
    check(begin != beginnings.end(), Code::invalid_config, "kohya's layout has no name for LoRA matrices of {}",
          component);
    for (const auto& [module, pair] : for_other_programs(component, pairs, names)) {
      const std::string name = begin->second + underscored(module);
      arrays[name + ".lora_down.weight"] = pair.down;
      arrays[name + ".lora_up.weight"] = pair.up;
      arrays[name + ".alpha"] = number(pair.alpha);
      ranks.insert(pair.rank()), alphas.insert(pair.alpha);
    }
  }
  // "Dynamic" is kohya's word for ranks that differ.
  metadata["ss_network_module"] = "networks.lora";
  metadata["ss_network_dim"] = ranks.size() == 1 ? std::to_string(*ranks.begin()) : "Dynamic";
  metadata["ss_network_alpha"] = alphas.size() == 1 ? fmt::format("{}", *alphas.begin()) : "Dynamic";
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  if (!parent.empty()) make_folders(parent.string());
  write_safetensors(path, arrays, metadata);
}

void write_comfyui_lora(const std::string& path, const LoraFile& lora, const LoraNames& names) {
  HostArrays arrays;
  const Metadata metadata = metadata_of(lora, names);
  const std::string component = metadata.contains(kComponent) ? metadata.at(kComponent) : names.denoisers.front();
  if (const auto pairs = lora.pairs.find(component); pairs != lora.pairs.end())
    for (const auto& [module, pair] : for_other_programs(component, pairs->second, names)) {
      const std::string name = "diffusion_model." + module;
      arrays[name + ".lora_A.weight"] = pair.down;
      arrays[name + ".lora_B.weight"] = pair.up;
      arrays[name + ".alpha"] = number(pair.alpha);
    }
  write_safetensors(path, arrays, metadata);
}

}  // namespace md
