#include "maxdiffusion/lora/lora_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/finite.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weight_format.h"
#include "maxdiffusion/lora/lora_metadata.h"

namespace md {
namespace {

using nlohmann::json;

constexpr const char* kLeaveOut = "try: lora_missing_keys=warn, which uses the others";
constexpr size_t kListed = 20;  // keys listed for each kind of error

enum class Part { down, up, alpha, weight, bias, modulation, adapter };

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
    {".w_norm", Part::weight},  // LyCORIS' differences of norms
    {".b_norm", Part::bias},
    {".diff_m", Part::modulation},
};

constexpr const char* kDenoiser = "*";  // any denoiser
constexpr std::pair<const char*, const char*> kBeginnings[] = {{"diffusion_model.", kDenoiser},
                                                               {"lora_unet_", kDenoiser},
                                                               {"lora_transformer_", kDenoiser},
                                                               {"lycoris_", kDenoiser},
                                                               {"lora_te_", "text_encoder"},
                                                               {"lora_te1_", "text_encoder"},
                                                               {"lora_te2_", "text_encoder_2"},
                                                               {"lora_te3_", "text_encoder_2"},
                                                               {"clip_l.", "text_encoder"},  // OneTrainer
                                                               {"clip_g.", "text_encoder_2"},
                                                               {"t5.", "text_encoder_2"},
                                                               {"text_encoders.clip_l.transformer.", "text_encoder"},
                                                               {"text_encoders.clip_g.transformer.", "text_encoder_2"},
                                                               {"text_encoders.t5xxl.transformer.", "text_encoder_2"}};

/// Parts of keys of methods that are not read.
constexpr std::pair<const char*, const char*> kOtherMethods[] = {{".oft_", "OFT"},
                                                                 {".boft_", "BOFT"},
                                                                 {".hada_t", "LoHa with a core tensor"},
                                                                 {".a1.weight", "GLoRA"},
                                                                 {".a2.weight", "GLoRA"},
                                                                 {".b1.weight", "GLoRA"},
                                                                 {".b2.weight", "GLoRA"},
                                                                 {".vera_lambda_", "VeRA"},
                                                                 {".lokr_t", "LoKr with a core tensor"},
                                                                 {"lora_controlnet", "Control-LoRA"}};
/// And where only LoRA is.
constexpr std::pair<const char*, const char*> kOtherKinds[] = {{".dora_scale", "DoRA"},
                                                               {".lora_magnitude_vector", "DoRA"},
                                                               {".hada_", "LoHa"},
                                                               {".lokr_", "LoKr"},
                                                               {".ia3_l", "IA³"},
                                                               {".on_input", "IA³"},
                                                               {".lora_mid.", "LoCon with a core tensor"}};
constexpr const char* kCore = "lora_mid.weight";
constexpr const char* kOnInput = "on_input";
constexpr const char* kIa3OfLycoris = "weight";

/// Endings of the kinds that are no LoRA, and the part that each is.
const std::vector<std::pair<std::string, std::string>>& adapter_endings() {
  static const std::vector<std::pair<std::string, std::string>> all = [] {
    std::vector<std::pair<std::string, std::string>> endings = {
        {".lora_magnitude_vector.weight", kMagnitude},
        {".dora_scale", kMagnitude},
        {std::string(".") + kCore, kCore},
        {std::string(".") + kOnInput, kOnInput},
    };
    for (const Adapter* a : adapters())
      for (const Adapter::PartName& part : a->names())
        if (std::string(part.name).starts_with("lora_") ? part.name == std::string(kMagnitude)
                                                        : part.name != std::string("diff"))
          endings.emplace_back("." + std::string(part.name), part.name);
    return endings;
  }();
  return all;
}

std::string module_of(const std::string& path) { return path.substr(0, path.size() - std::string(".weight").size()); }

struct Key {
  std::string component, module;  // component "": none
  Part part;
  std::string name = {};  // of an adapter's part
};

/// Key of the safetensors metadata: the component that the file's matrices are for, if there are several denoisers.
constexpr const char* kComponent = "component";

/// "….lora_A.NAME.weight" → "….lora_A.weight": PEFT's own state holds the adapter's name.
std::string without_adapter_name(const std::string& key) {
  for (std::string_view matrix : {".lora_A.", ".lora_B.", ".lora_down.", ".lora_up.", ".lora_magnitude_vector."}) {
    const size_t at = key.find(matrix);
    if (at == key.npos) continue;
    const size_t name = at + matrix.size(), dot = key.find('.', name);
    if (dot != key.npos && key.substr(dot) == ".weight") return key.substr(0, name - 1) + ".weight";
  }
  return key;
}

/// Throws invalid_config for keys of methods that are not read.
void check_method(const std::string& path, const std::string& key, bool lora_alone = false) {
  if (lora_alone)
    for (const auto& [mark, method] : kOtherKinds)
      check(key.find(mark) == key.npos, Code::invalid_config,
            "LoRA '{}': key '{}' is of {}; expected only pairs of matrices, whose rank can change", path, key, method);
  for (const auto& [mark, method] : kOtherMethods)
    check(key.find(mark) == key.npos, Code::invalid_config, "LoRA '{}': key '{}' is of {}, which is not supported",
          path, key, method);
}

/// Throws invalid_config for quantized matrices: a LoRA file is read as it is.
void check_not_quantized(const std::string& path, const HostArrays& tensors) {
  try {
    check_marks(tensors);
    for (const auto& [key, array] : tensors)
      if (const FoundFormat found = format_of(tensors, key); found.format)
        fail(Code::invalid_config, "'{}' is {}", key, found.format->name);
    for (const auto& [key, array] : tensors)
      check(!is_format_extra(key), Code::invalid_config, "'{}' is of quantized weights", key);
  } catch (Error& e) {
    throw e.note(fmt::format("LoRA '{}': expected matrices in float32, float16 or bfloat16", path));
  }
}

void check_float(const std::string& path, const std::string& key, const HostArray& array) {
  check(is_float(array.dtype()), Code::invalid_config, "LoRA '{}': '{}' is {}; expected float32, float16 or bfloat16",
        path, key, to_string(array.dtype()));
  if (const auto at = first_not_finite(array))
    fail(Code::io, "LoRA '{}': '{}' holds a number that is not finite, the first at index {}: the file is damaged",
         path, key, *at);
}

/// Whether a key is for the image input of cross-attention, which LoRA files of Wan's image-to-video models have:
/// diffusers 0.42 loads the rest of such a file into a text-to-video model.
bool is_of_image_input(const std::string& key) {
  return std::ranges::any_of(
             std::initializer_list<std::string_view>{"cross_attn", "attn2", "img_emb", "image_embedder"},
             [&](auto layer) { return key.find(layer) != key.npos; }) &&
         std::ranges::any_of(std::initializer_list<std::string_view>{"k_img", "v_img", "add_k_proj", "add_v_proj",
                                                                     "norm_added_k", "img_emb", "image_embedder"},
                             [&](auto part) { return key.find(part) != key.npos; });
}

/// Null if no suffix matches.
const Ending* ending_of(const std::string& key) {
  const auto end = std::ranges::find_if(kEndings, [&](const Ending& e) { return key.ends_with(e.text); });
  return end == std::end(kEndings) ? nullptr : end;
}

/// `arrays`: of the file, where what a key is depends on its neighbours.
std::optional<Key> understood(const std::string& text, const LoraTargets& targets, const HostArrays& arrays) {
  const std::string key = without_adapter_name(text);
  std::vector<std::pair<std::string, std::string>> beginnings(std::begin(kBeginnings), std::end(kBeginnings));
  for (const std::string& c : targets.components())
    beginnings.emplace_back(c + ".", c == targets.denoisers().front() ? kDenoiser : c);
  Key k;
  const auto of = std::ranges::find_if(adapter_endings(), [&](const auto& e) { return key.ends_with(e.first); });
  const std::string ia3 = std::string(".") + kIa3OfLycoris;
  if (of != adapter_endings().end()) {
    k = {.module = key.substr(0, key.size() - of->first.size()), .part = Part::adapter, .name = of->second};
  } else if (const std::string module = key.substr(0, key.size() - std::min(key.size(), ia3.size()));
             key.ends_with(ia3) && arrays.contains(module + "." + kOnInput)) {
    k = {.module = module, .part = Part::adapter, .name = kIa3OfLycoris};
  } else if (const Ending* end = ending_of(key)) {
    k = {.module = key.substr(0, key.size() - std::string_view(end->text).size()), .part = end->part};
  } else {
    return std::nullopt;
  }
  auto strip = [&](std::string beginning) {
    bool found = k.module.starts_with(beginning);
    if (!found && beginning.ends_with('_')) {  // "lora_unet.mid_block.…"
      beginning.back() = '.';
      found = k.module.starts_with(beginning);
    }
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

/// The parameters that a key refers to; may be empty.
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

/// Whether diffusers 0.42 leaves out a key of a pair that the model has no place for: it does under its own names, and
/// under names of other programs where other blocks of the model have such a layer.
bool is_left_out_by_diffusers(const std::string& key, const Key& k, const LoraTargets& targets,
                              const std::string& denoiser) {
  return std::ranges::any_of(targets.components(), [&](const auto& c) { return key.starts_with(c + "."); }) ||
         targets.is_of_other_block(k.component == kDenoiser ? denoiser : k.component, k.module + ".weight", denoiser);
}

std::string listed(const std::vector<std::string>& keys) {
  const auto shown = std::min(keys.size(), kListed);
  auto text = fmt::format("{}", fmt::join(keys.begin(), keys.begin() + static_cast<long>(shown), ", "));
  if (shown < keys.size()) text += fmt::format(" and {} more", keys.size() - shown);
  return text;
}

/// The array with trailing sizes of 1 added or removed to `rank` dims; unchanged if that is not possible.
HostArray with_rank(const HostArray& a, size_t rank) {
  Dims d = a.dims();
  while (d.size() > rank && d.back() == 1) d.pop_back();
  if (d.size() >= 2) d.resize(std::max(rank, d.size()), 1);
  return a.reshaped(d);
}

/// A matrix reshaped for its target's dims.
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
  HostArrays parts;                  // of other kinds, as in the file
  std::optional<LoraPlace> part_of;  // where the file's tensor is several weights
  std::string module_key;            // a key of `parts`
  const LoraTarget* bias = nullptr;  // of the same layer
  std::string module, down_key, up_key, alpha_key;
  std::string component;  // the component in the file's metadata
  bool is_part = false;
};

/// The rows of a file's array that belong to a target.
HostArray rows_for(const LoraPlace& place, const HostArray& a, const std::string& path, const std::string& key) {
  if (place.parts == 1) return a;
  const int64_t part = place.target->dims[0] / std::ssize(place.part);
  check(!a.dims().empty() && a.dims()[0] == part * place.parts, Code::io,
        "LoRA '{}': '{}' is {}; expected {} rows, {} of which are for {} of {}", path, key, to_string(a.dims()),
        part * place.parts, place.target->dims[0], place.target->path, place.target->component);
  return select_parts(a, place.part, place.parts);
}

/// The range of columns of `up` outside of which all columns are zero: the first, and one past the last.
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

/// Matrices of several stacked weights may use disjoint parts of the rank: then each weight keeps only its part, with
/// alpha / rank unchanged. Weights whose part is empty are dropped.
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

/// Sets alpha of what was found: the file's, the metadata's, else the rank.
void set_alpha(Found& f, int64_t rank, const LoraMetadata& metadata, const std::string& name) {
  const bool in_metadata = metadata.covers(f.component);
  if (!f.alpha_key.empty() && f.pair.alpha == 0) {
    metadata.warn(fmt::format("'{}' is 0 and counts as the rank, as in kohya's trainers; diffusers adds nothing then",
                              f.alpha_key));
  } else if (in_metadata && !f.alpha_key.empty() && rank > 0) {
    const double other = metadata.alpha(f.component, f.module, rank), rounding = 0.01;  // bf16 has 8 bits
    if (std::abs(other - f.pair.alpha) > rounding * std::abs(other))
      metadata.warn(fmt::format("'{}' is {}, but the metadata has alpha {}; the tensor counts", f.alpha_key,
                                f.pair.alpha, other));
  }
  if (in_metadata && f.alpha_key.empty()) {
    f.pair.alpha = metadata.alpha(f.component, f.module, rank);
    if (f.pair.alpha == 0) metadata.warn("its metadata has alpha 0, so that matrices add nothing, as in PEFT");
  } else if (f.pair.alpha_in_file = f.pair.alpha != 0; !f.pair.alpha_in_file) {
    f.pair.alpha = static_cast<double>(rank);
  }
  check(std::isfinite(f.pair.alpha), Code::io, "LoRA for {}: alpha is {}", name, f.pair.alpha);
}

/// Whether there are parts other than those of lora and dora.
bool is_other_kind(const Found& f) {
  return std::ranges::any_of(f.parts, [](const auto& part) { return part.first != kMagnitude && part.first != kCore; });
}

/// A vector with the sizes of a weight's rows, or of its columns.
HostArray broadcastable(const HostArray& vector, const Dims& weight, bool of_columns) {
  Dims dims(weight.size(), 1);
  dims[of_columns ? 1 : 0] = vector.shape().elements();
  return vector.reshaped(dims);
}

/// Magnitudes as AdapterWeights has them: of rows, unless a file says [1, in, …], or only `in` fits.
HostArray magnitudes(const HostArray& m, const Dims& weight, const std::string& name) {
  const int64_t count = m.shape().elements();
  const bool columns = weight.size() >= 2 && count == weight[1] && m.dims().size() == weight.size() &&
                       m.dims()[0] == 1 && (weight.size() == 2 || count != weight[0]);
  check(weight.size() >= 2 && (columns || count == weight[0]), Code::io,
        "DoRA for {}: the magnitudes are {}, expected {} of a weight of {}", name, to_string(m.dims()), weight.at(0),
        to_string(weight));
  return broadcastable(m, weight, columns);
}

/// The rows of a part of a fused tensor's values that are the target's.
HostArray own_rows(const Found& f, const HostArray& a, const std::string& name) {
  return f.part_of ? rows_for(*f.part_of, a, name, f.module_key) : a;
}

/// The down matrix of LoCon with a core tensor [r, r, k, k] and down [r, in, 1, 1]: [r, in, k, k].
HostArray without_core(const Found& f, const Dims& weight, const std::string& name) {
  const HostArray &core = f.parts.at(kCore), &down = f.pair.down;
  const int64_t r = core.dims().empty() ? 0 : core.dims()[0];
  check(down && weight.size() == core.dims().size() && weight.size() > 2 && core.dims()[1] == r &&
            down.shape().elements() == r * weight[1] &&
            std::equal(core.dims().begin() + 2, core.dims().end(), weight.begin() + 2),
        Code::io, "LoRA for {}: the core tensor is {} and down {}; expected [r, r, …] and [r, {}] for a weight of {}",
        name, to_string(core.dims()), down ? to_string(down.dims()) : "missing", weight.size() > 1 ? weight[1] : 0,
        to_string(weight));
  Dims dims = weight;
  dims[0] = r;
  HostArray out(Shape{DType::f32, dims});
  const int64_t in = weight[1], window = out.shape().elements() / (r * in);
  const std::vector<float> a = float_rows(core, r * window, 0, r), b = float_rows(down, in, 0, r);
  const auto y = out.mutable_view<float>();
  std::ranges::fill(y, 0.0f);
  for (int64_t i = 0; i < r; ++i)
    for (int64_t j = 0; j < r; ++j)
      for (int64_t c = 0; c < in; ++c)
        for (int64_t k = 0; k < window; ++k)
          y[static_cast<size_t>((i * in + c) * window + k)] +=
              a[static_cast<size_t>((i * r + j) * window + k)] * b[static_cast<size_t>(j * in + c)];
  return out;
}

/// The pair of matrices with magnitudes.
void read_dora(const LoraTarget* target, Found& f, const std::string& name, LoraFile& lora) {
  AdapterWeights w{.kind = &adapter_named("dora"),
                   .parts = {{"lora_A.weight", f.pair.down}, {"lora_B.weight", f.pair.up}},
                   .alpha = f.pair.alpha,
                   .alpha_in_file = f.pair.alpha_in_file,
                   .weight_dims = target->dims};
  const HostArray& m = f.parts.at(kMagnitude);
  const bool rows = !f.part_of || m.dims().empty() || m.dims()[0] != 1;
  w.parts[kMagnitude] = magnitudes(rows ? own_rows(f, m, name) : m, target->dims, name);
  lora.adapters[target->component].emplace(target->path, std::move(w));
}

/// LoHa, LoKr and IA³. Of a tensor that is several weights, LoKr's product becomes a difference.
void read_other_kind(const LoraTarget* target, Found& f, const std::string& name, const LoraMetadata& metadata,
                     LoraFile& lora) {
  AdapterWeights w{.parts = f.parts, .weight_dims = target->dims};
  const auto begins = [&](const char* text) {
    return std::ranges::any_of(w.parts, [&](const auto& part) { return part.first.starts_with(text); });
  };
  check(!f.pair.down && !f.pair.up && !f.parts.contains(kCore), Code::io,
        "LoRA for {}: there is '{}' next to matrices of LoRA", name, f.module_key);
  Dims whole = target->dims;
  if (f.part_of) whole[0] = whole[0] / std::ssize(f.part_of->part) * f.part_of->parts;
  if (begins("hada_")) {
    w.kind = &adapter_named("loha");
    for (const char* part : {"hada_w1_a", "hada_w2_a"})
      if (w.parts.contains(part)) w.parts[part] = own_rows(f, w.parts[part], name);
  } else if (begins("lokr_")) {
    w.kind = &adapter_named("lokr");
  } else {
    w.kind = &adapter_named("ia3");
    HostArray l = w.parts.contains("ia3_l") ? w.parts["ia3_l"] : HostArray();
    bool on_input = false;
    if (!l) {  // LyCORIS has the difference from 1
      check(w.parts.contains(kIa3OfLycoris) && w.parts[kOnInput].shape().elements() == 1, Code::io,
            "IA³ for {}: '{}' stands without its neighbour; expected weight and on_input", name, f.module_key);
      on_input = w.parts[kOnInput].to_doubles()[0] != 0;
      const HostArray difference = w.parts[kIa3OfLycoris].cast(DType::f32);
      l = HostArray(difference.shape());
      std::ranges::transform(difference.view<float>(), l.mutable_view<float>().begin(), [](float v) { return v + 1; });
    } else if (l.dims().size() == 2) {
      on_input = l.dims()[0] == 1;
    } else {
      on_input = metadata.scales_input(f.component, f.module);
    }
    check(target->dims.size() >= 2 && l.shape().elements() == whole[on_input ? 1 : 0], Code::io,
          "IA³ for {}: the factors are {}, expected {} of {}", name, to_string(l.dims()),
          target->dims.size() < 2 ? 0 : whole[on_input ? 1 : 0], to_string(whole));
    // Of PEFT's, what scales a layer's result scales its bias.
    if (f.bias && !on_input && w.parts.contains("ia3_l"))
      lora.adapters[target->component][f.bias->path] = {
          .kind = w.kind, .parts = {{"ia3_l", own_rows(f, l.reshaped({l.shape().elements()}), name)}}};
    l = broadcastable(l, target->dims, on_input);
    w.parts = {{"ia3_l", on_input ? l : own_rows(f, l, name)}};
  }
  if (w.parts.contains(kMagnitude)) {
    const HostArray& m = w.parts[kMagnitude];
    w.parts[kMagnitude] = magnitudes(own_rows(f, m, name), target->dims, name);
  }
  w.kind->check_fits(w, w.kind->name() == "lokr" ? whole : target->dims, name);
  const int64_t rank = w.kind->rank(w.dims());
  set_alpha(f, rank, metadata, name);
  w.alpha = f.pair.alpha, w.alpha_in_file = f.pair.alpha_in_file;
  if (f.part_of && w.kind->name() == "lokr") {
    check(
        !w.parts.contains(kMagnitude), Code::invalid_config,
        "LoKr for {}: it has DoRA's magnitudes and is for a tensor that is several weights here; expected one of them",
        name);
    lora.differences[target->component][target->path] = own_rows(f, change_of(w, whole), name);
  } else {
    lora.adapters[target->component].emplace(target->path, std::move(w));
  }
}

/// The default denoiser of names without a component.
std::string meant_denoiser(const SafetensorsReader& file, const LoraTargets& targets, const std::string& requested) {
  if (!requested.empty()) return requested;
  const auto stored = file.metadata().find(kComponent);
  const bool known = stored != file.metadata().end() && std::ranges::count(targets.denoisers(), stored->second) > 0;
  return known ? stored->second : targets.denoisers().front();
}

/// The only denoiser that the file has matrices for, if it is not the first; else empty.
std::string other_denoiser(const LoraFile& lora, const LoraNames& names) {
  std::string only;
  for (const std::string& d : names.denoisers) {
    if (!lora.pairs.contains(d) && !lora.differences.contains(d) && !lora.adapters.contains(d)) continue;
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

using Pairs = std::map<std::string, LoraPair>;

/// A weight's matrices, and its place in another program's tensor.
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

/// Matrices of one tensor from those of the weights that it consists of: each weight gets a disjoint part of the rank,
/// with zeros elsewhere. alpha / rank is the weights' common value, else 1.
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
    Dims up_dims = up;
    up_dims[0] = m.pair->up.dims()[0];
    HostArray wide = zeros(first.up.dtype(), up_dims);
    set_block(wide, 0, at, times(m.pair->up, same ? 1 : strength(*m.pair)));
    set_parts(out.up, m.at.part, m.at.parts, wide);
    at += m.pair->rank();
  }
  return out;
}

/// Names in PEFT's metadata are ends of names, which a text encoder has with and without this.
std::string name_in_patterns(std::string module) {
  const std::string optional = "text_model.";
  if (module.starts_with(optional)) module.erase(0, optional.size());
  return module;
}

/// PEFT's config of weights of one kind; see peft_config_json.
std::string peft_config(const std::map<std::string, AdapterWeights>& weights, const std::string& component) {
  std::map<std::string, LoraStrength> strengths;
  std::vector<std::string> input_scaled;
  LokrSizes sizes;
  const Adapter& kind = *weights.begin()->second.kind;
  for (const auto& [path, w] : weights) {
    const std::string module = name_in_patterns(module_of(path));
    LoraStrength s{kind.rank(w.dims()), w.alpha};
    if (s.rank == 0 &&
        kind.has_rank()) {  // PEFT makes whole factors where the rank is large, and scales by alpha / rank
      const Dims& whole = w.parts.at("lokr_w2").dims();
      s.rank = std::max(whole[0], whole[1]);
      s.alpha = static_cast<double>(s.rank);
    }
    strengths[module] = s;
    sizes.factor = w.factor;
    sizes.decompose_both |= w.parts.contains("lokr_w1_a");
    if (const auto l = w.parts.find("ia3_l"); l != w.parts.end() && l->second.dims()[0] == 1)
      input_scaled.push_back(module);
  }
  return peft_config_json(kind, strengths, input_scaled, kind.name() == "lokr" ? std::optional(sizes) : std::nullopt,
                          component);
}

/// Of a bias, what kind full has is its own name's: "….to_q.bias" is no module.
std::string module_of_parameter(const std::string& path) { return path.ends_with(".weight") ? module_of(path) : path; }

/// Module → values in other layouts: if original files hold only this model, by its names; else by the published names.
/// `join(module, members)` makes the value of a tensor from those of the weights that are its parts, in their order.
template <class Value, class Join>
std::map<std::string, Value> for_other_programs(const std::string& component, const std::map<std::string, Value>& all,
                                                const LoraNames& names, const Join& join) {
  const auto others = names.others.find(component);
  std::map<std::string, Value> out;
  std::map<std::string, std::vector<std::pair<WeightAlias, const Value*>>> parts;
  for (const auto& [weight, value] : all) {
    std::vector<WeightAlias> aliases;
    if (others != names.others.end() && others->second.aliases) aliases = others->second.aliases(weight);
    if (aliases.empty() || !aliases.front().prefix.empty())
      out[module_of_parameter(weight)] = value;
    else if (aliases.front().parts == 1)
      out[module_of_parameter(aliases.front().name)] = value;
    else
      parts[module_of_parameter(aliases.front().name)].emplace_back(aliases.front(), &value);
  }
  for (auto& [module, members] : parts) {
    std::ranges::sort(members, {}, [](const auto& m) { return m.first.part; });
    out[module] = join(module, members);
  }
  return out;
}

Pairs for_other_programs(const std::string& component, const Pairs& pairs, const LoraNames& names) {
  return for_other_programs(component, pairs, names, [](const std::string&, const auto& members) {
    std::vector<Member> low_rank;
    for (const auto& [alias, pair] : members) low_rank.push_back({alias, pair});
    return side_by_side(low_rank);
  });
}

using Members = std::vector<std::pair<WeightAlias, const AdapterWeights*>>;

/// An adapter of one tensor from those of weights that are parts of it.
AdapterWeights one_tensor(const std::string& module, const Members& members) {
  const AdapterWeights& first = *members.front().second;
  const int64_t parts = members.front().first.parts;
  int64_t covered = 0;
  for (const auto& [alias, w] : members) covered += std::ssize(alias.part);
  const auto wide = [&](Dims dims) {  // of all parts
    dims[0] = dims[0] / std::ssize(members.front().first.part) * parts;
    return HostArray(Shape{DType::f32, std::move(dims)});
  };
  const auto side = [&](HostArray out, const auto& value) {
    for (const auto& [alias, w] : members) set_parts(out, alias.part, parts, value(*w));
    return out;
  };
  if (first.kind->name() == "dora") {
    check(covered == parts, Code::invalid_config,
          "dora: '{}' is one tensor in this layout, of which {} of {} parts have an adapter; expected all of them, or "
          "the layout of diffusers",
          module, covered, parts);
    std::vector<LoraPair> pairs;
    for (const auto& [alias, w] : members)
      pairs.push_back({w->parts.at("lora_A.weight"), w->parts.at("lora_B.weight"), w->alpha});
    std::vector<Member> low_rank;
    for (size_t i = 0; i < members.size(); ++i) low_rank.push_back({members[i].first, &pairs[i]});
    const LoraPair pair = side_by_side(low_rank);
    const auto magnitude = [](const AdapterWeights& w) { return w.parts.at(kMagnitude).cast(DType::f32); };
    return {.kind = first.kind,
            .parts = {{"lora_A.weight", pair.down},
                      {"lora_B.weight", pair.up},
                      {kMagnitude, side(wide(magnitude(first).dims()), magnitude)}},
            .alpha = pair.alpha};
  }
  if (first.kind->name() == "ia3") {
    const auto factors = [](const AdapterWeights& w) { return w.parts.at("ia3_l").cast(DType::f32); };
    for (const auto& [alias, w] : members)
      check(factors(*w).dims()[0] != 1, Code::invalid_config,
            "ia3: '{}' is one tensor in this layout, whose input cannot be scaled for some parts of it; expected "
            "feedforward_modules without it",
            module);
    HostArray ones = wide(factors(first).dims());
    std::ranges::fill(ones.mutable_view<float>(), 1.0f);
    return {.kind = first.kind, .parts = {{"ia3_l", side(std::move(ones), factors)}}};
  }
  const auto change = [](const AdapterWeights& w) {
    return w.kind->name() == "full" ? w.parts.at("diff").cast(DType::f32) : change_of(w, w.weight_dims);
  };
  HostArray zeros = wide(change(first).dims());
  std::ranges::fill(zeros.mutable_view<float>(), 0.0f);
  return {.kind = &adapter_named("full"), .parts = {{"diff", side(std::move(zeros), change)}}};
}

/// The same of other kinds than lora. Of weights that are one tensor elsewhere the changes become one difference,
/// except for dora and ia3, whose parts are those of rows.
std::map<std::string, AdapterWeights> of_other_kinds(const std::string& component,
                                                     const std::map<std::string, AdapterWeights>& all,
                                                     const LoraNames& names) {
  return for_other_programs(component, all, names, one_tensor);
}

/// Under LyCORIS' names.
void put_lycoris(const std::string& name, const AdapterWeights& w, HostArrays& arrays) {
  const std::string bias = "bias";
  if (w.kind->name() == "full" && name.ends_with(bias)) {
    arrays[name.substr(0, name.size() - bias.size() - 1) + ".diff_b"] = w.parts.at("diff");
    return;
  }
  for (const auto& [part, array] : w.kind->for_lycoris(w)) arrays[name + "." + part] = array;
  const bool scaled = w.kind->rank(w.dims()) > 0;
  if (w.kind->has_rank()) arrays[name + ".alpha"] = number(scaled ? w.alpha : 1);
}

}  // namespace

std::string summary(const LoraFile& lora) {
  std::vector<std::string> parts;
  for (const auto& [component, pairs] : lora.pairs)
    parts.push_back(fmt::format("{} pairs of matrices of {}", pairs.size(), component));
  for (const auto& [component, arrays] : lora.differences)
    parts.push_back(fmt::format("{} differences of {}", arrays.size(), component));
  for (const auto& [component, weights] : lora.adapters) {
    std::map<std::string_view, size_t> counts;
    for (const auto& [path, w] : weights) ++counts[w.kind->name()];
    for (const auto& [kind, count] : counts) parts.push_back(fmt::format("{} {} of {}", count, kind, component));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

void LoraFile::add(const std::string& component, const std::string& path, AdapterWeights w) {
  if (w.kind->name() == "lora")
    pairs[component][path] = {w.parts.at("lora_A.weight"), w.parts.at("lora_B.weight"), w.alpha, w.alpha_in_file};
  else if (w.kind->name() == "full")
    differences[component][path] = w.parts.at("diff");
  else
    adapters[component][path] = std::move(w);
}

std::map<std::string, std::map<std::string, AdapterWeights>> LoraFile::all() const {
  auto out = adapters;
  for (const auto& [component, found] : pairs)
    for (const auto& [path, pair] : found)
      out[component][path] = {.kind = &adapter_named("lora"),
                              .parts = {{"lora_A.weight", pair.down}, {"lora_B.weight", pair.up}},
                              .alpha = pair.alpha,
                              .alpha_in_file = pair.alpha_in_file};
  for (const auto& [component, arrays] : differences)
    for (const auto& [path, array] : arrays)
      out[component][path] = {.kind = &adapter_named("full"), .parts = {{"diff", array}}};
  return out;
}

std::map<std::string, std::map<std::string, AdapterWeights>> LoraFile::others() const {
  LoraFile without = *this;
  without.pairs.clear();
  return without.all();
}

bool LoraFile::has(const std::string& component, const std::string& path) const {
  const auto in = [&](const auto& all) {
    const auto its = all.find(component);
    return its != all.end() && its->second.contains(path);
  };
  return in(pairs) || in(differences) || in(adapters);
}

void LoraFile::erase(const std::string& component) {
  pairs.erase(component), differences.erase(component), adapters.erase(component);
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

LoraFile read_lora(const std::string& path, const LoraTargets& targets, const std::string& denoiser,
                   MissingKeys missing) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  check_not_quantized(path, file.tensors());
  const LoraMetadata metadata = LoraMetadata::read(path, file.metadata());
  const std::string first = targets.denoisers().front(), meant = meant_denoiser(file, targets, denoiser);
  LoraFile lora{.name = path};
  std::map<const LoraTarget*, Found> found;
  std::map<const LoraTarget*, std::string> difference_keys;
  std::vector<std::string> unread, of_image_input, of_other_layers, fused;
  std::set<std::string> other_shape;
  std::set<const LoraTarget*> split;  // have matrices of their own
  for (const auto& [key, array] : file.tensors()) {
    check_method(path, key);
    const std::optional<Key> k = understood(key, targets, file.tensors());
    if (!k || k->part != Part::down) continue;
    for (const LoraPlace& place : places_of(*k, targets, meant))
      if (place.parts == 1) split.insert(place.target);
  }
  for (const auto& tensor : file.tensors()) {
    const std::string& key = tensor.first;
    const HostArray& array = tensor.second;
    const std::optional<Key> k = understood(key, targets, file.tensors());
    const std::vector<LoraPlace> places = k ? places_of(*k, targets, meant) : std::vector<LoraPlace>();
    const bool is_pair = k && (k->part == Part::down || k->part == Part::up || k->part == Part::alpha);
    if (is_pair && !places.empty() &&
        std::ranges::all_of(places, [&](const LoraPlace& p) { return p.parts > 1 && split.contains(p.target); })) {
      fused.push_back(key);
      continue;
    }
    if (places.empty() && is_of_image_input(key)) {
      of_image_input.push_back(key);
      continue;
    }
    if (places.empty()) {
      if (is_pair && is_left_out_by_diffusers(key, *k, targets, meant))
        of_other_layers.push_back(key);
      else if (!targets.has_elsewhere(key, array))
        unread.push_back(key);
      continue;
    }
    if (k->part != Part::alpha && k->name != kOnInput) check_float(path, key, array);
    for (const LoraPlace& place : places) {
      const LoraTarget* target = place.target;
      auto only = [&](std::string& before) {
        check(before.empty(), Code::io, "LoRA '{}': '{}' and '{}' are both for {} of {}", path, before, key,
              target->path, target->component);
        before = key;
      };
      if (k->part == Part::weight || k->part == Part::bias || k->part == Part::modulation) {
        only(difference_keys[target]);
        const HostArray difference = rows_for(place, array, path, key);
        if (without_ones(difference.dims()) != without_ones(target->dims)) {
          Error e(Code::io, fmt::format("LoRA '{}': '{}' is {}, but {} of {} is {}", path, key, to_string(array.dims()),
                                        target->path, target->component, to_string(target->dims)));
          if (missing != MissingKeys::left_out) throw e.note(kLeaveOut);
          other_shape.insert(key);
          continue;
        }
        lora.differences[target->component][target->path] = difference.reshaped(target->dims);
        continue;
      }
      Found& f = found[target];
      f.module = k->module;
      f.component = target->component == meant && k->component != meant ? first : target->component;
      f.is_part = place.parts > 1;
      f.part_of = place.parts > 1 ? std::optional(place) : std::nullopt;
      if (k->part == Part::adapter) {
        check(f.parts.emplace(k->name, array).second, Code::io, "LoRA '{}': {} of {} has more than one {}", path,
              target->path, target->component, k->name);
        f.module_key = key;
        const std::string layer = module_of(target->path);
        const std::vector<LoraPlace> bias = targets.find(target->component, layer + ".bias", target->component);
        f.bias = bias.size() == 1 ? bias[0].target : nullptr;
        continue;
      }
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
  if (!fused.empty())
    log_warning("LoRA '{}': {} of {} keys are left out, as diffusers does: their parts have matrices of their own: {}",
                path, fused.size(), file.tensors().size(), listed(fused));
  if (!of_image_input.empty())
    log_warning("LoRA '{}': {} of {} keys are left out, as diffusers does: this model has no image input: {}", path,
                of_image_input.size(), file.tensors().size(), listed(of_image_input));
  const bool any_place = !found.empty() || !lora.differences.empty();
  if (any_place && unread.empty() && !of_other_layers.empty())
    log_warning("LoRA '{}': {} of {} keys are left out, as diffusers does: this model has no such layers: {}", path,
                of_other_layers.size(), file.tensors().size(), listed(of_other_layers));
  else
    unread.insert(unread.end(), of_other_layers.begin(), of_other_layers.end());
  if (!unread.empty() && any_place && missing == MissingKeys::left_out) {
    log_warning("LoRA '{}': {} of {} keys have no place in this model and are left out: {}", path, unread.size(),
                file.tensors().size(), listed(unread));
  } else if (!unread.empty()) {
    Error e(Code::io, fmt::format("LoRA '{}': {} of {} keys have no place in this model", path, unread.size(),
                                  file.tensors().size()));
    e.note("unread: " + listed(unread));
    e.note(fmt::format("the model has: {}; is the file made for another model, or by a method other than LoRA?",
                       fmt::join(targets.components(), ", ")));
    if (std::ranges::any_of(unread, [](const std::string& key) { return key.starts_with(kBundledEmbeddings); }))
      e.note(
          fmt::format("{}WORD… are the embeddings of a word: generate and serve read them in the LoRA files that "
                      "they start with, for CLIP text encoders of the same width",
                      kBundledEmbeddings));
    if (any_place) e.note(kLeaveOut);
    throw e;
  }
  std::set<const LoraTarget*> misfits;
  std::set<std::string> alone;  // alphas
  std::erase_if(found, [&](const auto& item) {
    const Found& f = item.second;
    const bool is_alone = !f.alpha_key.empty() && !f.pair.down && !f.pair.up && f.parts.empty();
    if (is_alone) alone.insert(f.alpha_key);
    return is_alone;
  });
  if (!alone.empty())
    log_warning("LoRA '{}': {} of {} keys are left out: alphas without matrices: {}", path, alone.size(),
                file.tensors().size(), listed({alone.begin(), alone.end()}));
  for (auto& [target, f] : found) {
    const std::string name = fmt::format("{} of {} in '{}'", target->path, target->component, path);
    if (is_other_kind(f)) {
      read_other_kind(target, f, name, metadata, lora);
      continue;
    }
    if (f.parts.contains(kCore)) f.pair.down = without_core(f, target->dims, name);
    check(f.pair.down && f.pair.up, Code::io, "LoRA for {}: there is '{}' without its {} matrix", name,
          f.pair.down ? f.down_key
          : f.pair.up ? f.up_key
                      : f.alpha_key,
          f.pair.down ? "up" : "down");
    try {
      check_fits(f.pair, target->dims, name);
    } catch (Error& e) {
      if (missing != MissingKeys::left_out) throw e.note(kLeaveOut);
      other_shape.insert({f.down_key, f.up_key});
      misfits.insert(target);
      continue;
    }
    check(f.pair.rank() > 0, Code::io, "LoRA for {}: the rank is 0", name);
    set_alpha(f, f.pair.rank(), metadata, name);
    if (f.parts.contains(kMagnitude)) read_dora(target, f, name, lora);
  }
  if (!other_shape.empty())
    log_warning("LoRA '{}': {} of {} keys are of another shape than this model's weights and are left out: {}", path,
                other_shape.size(), file.tensors().size(), listed({other_shape.begin(), other_shape.end()}));
  std::erase_if(found, [&](const auto& f) {
    return is_other_kind(f.second) || f.second.parts.contains(kMagnitude) || misfits.contains(f.first);
  });
  keep_own_ranks(found);
  for (auto& [target, f] : found) lora.pairs[target->component].emplace(target->path, std::move(f.pair));
  check(!lora.pairs.empty() || !lora.differences.empty() || !lora.adapters.empty(), Code::io,
        "LoRA '{}' holds no matrices", path);
  return lora;
}

std::string write_peft_lora(const std::string& folder, const LoraFile& lora, const LoraNames& names) {
  HostArrays arrays;
  std::map<std::string, std::map<std::string, LoraStrength>> strengths;
  Metadata metadata = metadata_of(lora, names);
  json others = json::object();  // of kinds that have members of their own in the metadata
  bool dora = false;
  const auto component_in_file = [&](const std::string& component) {
    const bool other = metadata.contains(kComponent) && metadata.at(kComponent) == component;
    return other ? names.denoisers.front() : component;
  };
  for (const auto& [component, weights] : lora.all()) {
    const std::string denoiser = component_in_file(component);
    std::map<std::string, AdapterWeights> lokr;
    for (const auto& [path, w] : weights) {
      const std::string module = module_of(path);
      if (w.kind->name() == "lokr") lokr[path] = w;
      if (w.kind->name() != "lora" && w.kind->name() != "dora" && w.kind->name() != "lokr") continue;
      for (const auto& [part, array] : w.kind->for_peft(w)) arrays[denoiser + "." + module + "." + part] = array;
      if (w.kind->name() == "lokr") continue;
      dora |= w.kind->name() == "dora";
      strengths[denoiser][name_in_patterns(module)] = {w.kind->rank(w.dims()), w.alpha};
    }
    if (!lokr.empty()) others.update(parse_json(peft_config(lokr, denoiser)));
  }
  if (arrays.empty()) return "";
  metadata["format"] = "pt";
  metadata["lora_adapter_metadata"] = others.empty() ? lora_metadata_json(strengths, dora) : others.dump(2);
  make_folders(folder);
  std::string path = folder + "/pytorch_lora_weights.safetensors";
  write_safetensors(path, arrays, metadata);
  return path;
}

void write_peft_folders(const std::string& folder, const LoraFile& lora) {
  for (const auto& [component, weights] : lora.adapters) {
    HostArrays arrays;
    const Adapter* kind = weights.begin()->second.kind;
    if (kind->name() == "dora") continue;  // diffusers reads them
    const auto scaled = std::ranges::find_if(weights, [](const auto& w) {
      const auto l = w.second.parts.find("ia3_l");
      return l != w.second.parts.end() && l->second.dims()[0] != 1 && w.second.has_bias;
    });
    if (scaled != weights.end()) {
      log_warning(
          "{}: no adapter_model.safetensors is written: PEFT's IA³ also scales biases, as that of {}; "
          "feedforward_modules={} scales its input",
          component, module_of(scaled->first), module_of(scaled->first));
      continue;
    }
    for (const auto& [path, w] : weights)
      for (const auto& [part, array] : w.kind->for_peft(w))
        arrays["base_model.model." + module_of(path) + "." + part] = array;
    const std::string place = folder + "/peft/" + component;
    make_folders(place);
    write_file_atomic(place + "/adapter_config.json", peft_config(weights, ""));
    write_safetensors(place + "/adapter_model.safetensors", arrays, {{"format", "pt"}});
  }
}

LoraContents read_lora_contents(const std::string& path, bool any_kind) {
  const SafetensorsReader file = SafetensorsReader::open(path);
  const LoraMetadata metadata = LoraMetadata::read(path, file.metadata());
  LoraContents out{.metadata = file.metadata()};
  if (!any_kind) check_not_quantized(path, file.tensors());
  std::map<std::string, NamedPair> pairs;
  for (const auto& [key, array] : file.tensors()) {
    if (!any_kind) check_method(path, key, true);
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
      if (!any_kind) check_float(path, key, array);
      (end->part == Part::down ? p.down_key : p.up_key) = key;
      (end->part == Part::down ? p.pair.down : p.pair.up) = array;
    }
  }
  for (auto& [module, p] : pairs) {
    if (any_kind && !p.pair.down && !p.pair.up) {  // alpha of another kind
      out.others[p.alpha_key] = HostArray();
      continue;
    }
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
  check(any_kind || !out.pairs.empty(), Code::io, "LoRA '{}' holds no pairs of matrices", path);
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
                      const std::map<std::string, std::string>& extra) {
  std::map<std::string, std::string> beginnings = {{"text_encoder", two_text_encoders ? "lora_te1_" : "lora_te_"},
                                                   {"text_encoder_2", "lora_te2_"}};
  Metadata metadata = metadata_of(lora, names);
  metadata.insert(extra.begin(), extra.end());
  beginnings[metadata.contains(kComponent) ? metadata.at(kComponent) : names.denoisers.front()] = "lora_unet_";
  HostArrays arrays;
  std::set<int64_t> ranks;
  std::set<double> alphas;
  const auto beginning = [&](const std::string& component) {
    auto begin = beginnings.find(component);
    check(begin != beginnings.end(), Code::invalid_config, "kohya's layout has no name for LoRA matrices of {}",
          component);
    return begin->second;
  };
  for (const auto& [component, pairs] : lora.pairs) {
    const std::string begin = beginning(component);
    for (const auto& [module, pair] : for_other_programs(component, pairs, names)) {
      const std::string name = begin + underscored(module);
      arrays[name + ".lora_down.weight"] = pair.down;
      arrays[name + ".lora_up.weight"] = pair.up;
      arrays[name + ".alpha"] = number(pair.alpha);
      ranks.insert(pair.rank()), alphas.insert(pair.alpha);
    }
  }
  const Adapter* kind = adapters()[0];
  for (const auto& [component, others] : lora.others()) {
    const std::string begin = beginning(component);
    for (const auto& [module, w] : of_other_kinds(component, others, names)) {
      put_lycoris(begin + underscored(module), w, arrays);
      if (const int64_t rank = w.kind->rank(w.dims()); rank > 0) ranks.insert(rank), alphas.insert(w.alpha);
    }
    kind = others.begin()->second.kind;
  }
  // kohya writes "Dynamic" if ranks differ.
  metadata["ss_network_module"] = kind == adapters()[0] ? "networks.lora" : "lycoris.kohya";
  if (kind != adapters()[0]) {
    json arguments = {{"algo", kind->lycoris_algorithm()}};
    if (kind->name() == "dora") arguments["dora_wd"] = "True";
    metadata["ss_network_args"] = arguments.dump();
  }
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
  const auto all = lora.others();
  if (const auto others = all.find(component); others != all.end())
    for (const auto& [module, w] : of_other_kinds(component, others->second, names))
      put_lycoris("diffusion_model." + module, w, arrays);
  write_safetensors(path, arrays, metadata);
}

}  // namespace md
