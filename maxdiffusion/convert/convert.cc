#include "maxdiffusion/convert/convert.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/float_dtype.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/mapped_memory.h"
#include "maxdiffusion/base/new_files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/quantized_writers.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/model_folder/match_weights.h"
#include "maxdiffusion/run/lora_files.h"
#include "maxdiffusion/storage/hub_cache.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/remote_sync.h"
#include "maxdiffusion/storage/write.h"
#include "maxdiffusion/train/step.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kLora = "pytorch_lora_weights.safetensors";

/// One model: its weights and their names.
struct Part {
  std::string name;    // "unet"; empty: the folder contains a single model
  std::string config;  // text of config.json
  std::string weights, stem;
  WeightNameMap weight_names;
  ParamTable params;
  std::shared_ptr<OpenedWeights> opened;     // keeps the weights open until they are read
  std::shared_ptr<CheckpointReader> shards;  // if several processes wrote the weights in shards; else null
};

/// Everything that is read.
struct Source {
  std::string path;
  std::vector<Part> parts;
  std::map<std::string, std::string> texts;  // texts of a model folder, by path
  SingleFile single_file;                    // of the family
  std::vector<ScaledLora> loras;             // to be merged
};

/// A local copy of a model in a bucket: a file, a folder, a checkpoint, or a run's newest checkpoint.
std::string copied(const std::string& from) {
  if (!is_remote(from)) return from;
  const std::string folder = newest_checkpoint(from);
  return find_file(below(folder, kState)) ? local_checkpoint(folder, CheckpointPart::all) : local_copy(folder);
}

/// Resolves a name on the command line to a path.
std::string place_of(const std::string& from, const FolderKeys& k) {
  if (fs::is_regular_file(from)) return from;
  return newest_checkpoint(fs::is_directory(from) ? from : local_folder(from, k.revision));
}

/// Whether a path, which may not exist, is a folder or inside of it.
bool is_inside(const std::string& path, const std::string& folder) {
  const fs::path outer = fs::weakly_canonical(folder + "/."), inner = fs::weakly_canonical(path);
  return std::ranges::mismatch(outer, inner).in1 == outer.end();
}

/// Opens the checkpoint in a folder if it has a component's weights in shards; else null.
std::shared_ptr<CheckpointReader> shards_of(const std::string& folder, const std::string& component) {
  if (!exists(folder + "/" + kIndex)) return nullptr;
  auto reader = std::make_shared<CheckpointReader>(folder);
  const std::string prefix = array_of_weight(component, "");
  const auto first = reader->arrays().lower_bound(prefix);
  return first != reader->arrays().end() && first->first.starts_with(prefix) ? reader : nullptr;
}

/// A part from a checkpoint that several processes wrote.
Part sharded_part(const std::string& name, const Component& c, ParamTable params,
                  std::shared_ptr<CheckpointReader> shards) {
  for (const Param& p : params.params())
    if (p.stacked > 0) shards->add_stack(array_of_weight(name, p.path), p.stacked);
  return {.name = name,
          .config = c.config_text,
          .weights = {},
          .stem = weights_stem(name),
          .weight_names = weight_names(c),
          .params = std::move(params),
          .opened = {},
          .shards = std::move(shards)};
}

Part part_of(const std::string& name, const Component& c, const std::string& weights,
             const std::shared_ptr<OpenedWeights>& opened) {
  const OpenedWeights::File file = opened->take(name, weights);
  ParamTable params = match_weights(name, c, *file, weights);
  opened->keep(name, weights, file);
  return {.name = name,
          .config = c.config_text,
          .weights = weights,
          .stem = weights_stem(name),
          .weight_names = weight_names(c),
          .params = std::move(params),
          .opened = opened,
          .shards = {}};
}

/// `weights`: a file or folder; empty: the component's own.
Part part_of(const ModelFolder& folder, const std::string& name, const std::string& weights = "") {
  const auto found = folder.components().find(name);
  if (found == folder.components().end()) {
    std::vector<std::string> names;
    for (const auto& [known, component] : folder.components()) names.push_back(known);
    fail(Code::invalid_config, "component '{}' is not one of: {}", name, fmt::join(names, ", "));
  }
  if (auto shards = shards_of(folder.path(), name); shards && weights.empty())
    return sharded_part(name, found->second, folder.params(name), std::move(shards));
  const std::string& from = weights.empty() ? found->second.weights : weights;
  check_in_single_file(folder, *make_family(folder), name, from);
  return part_of(name, found->second, from, folder.opened());
}

/// A folder with a single model, whose class is in config.json.
Part lone_part(const std::string& folder) {
  const std::string file = folder + "/config.json", text = unquantized(read_file(file));
  const json config = parse_json_or_discard(text);
  const json name = config.is_object() ? config.value("_class_name", json()) : json();
  const ModelClass* known = name.is_string() ? find_model_class(name) : nullptr;
  check(known, Code::invalid_config, "{}: _class_name is {}; expected one of: {}", file, name.dump(),
        fmt::join(model_class_names(), ", "));
  return part_of("", {known->name, known->read(config), folder, file, text}, folder, std::make_shared<OpenedWeights>());
}

Source open_source(const std::string& from, const ConvertKeys& k, const std::optional<LoraKeys>& loras) {
  Source s{.path = place_of(from, k.folder)};
  const bool file = fs::is_regular_file(from);
  if (!file && !exists(s.path + "/model_index.json") && exists(s.path + "/config.json")) {
    check(k.component.empty(), Code::invalid_config, "component is '{}', but '{}' is a folder of one model",
          k.component, s.path);
    s.parts.push_back(lone_part(s.path));
    return s;
  }
  FolderKeys keys = k.folder;
  if (file && !k.component.empty()) {  // a single model: the folder determines which
    check(!k.folder.single_file_config.empty(), Code::invalid_config,
          "component is '{}' and '{}' a file; single_file_config must name a model folder with its config.json",
          k.component, from);
    keys.single_file_config.clear();
    s.parts.push_back(part_of(ModelFolder::open(k.folder.single_file_config, keys), k.component, from));
    return s;
  }
  const ModelFolder folder = ModelFolder::open(s.path, keys);
  const auto family = make_family(folder);
  s.single_file = family->spec().single_file;
  if (loras) s.loras = read_loras(*loras, folder, *family);
  for (const ScaledLora& lora : s.loras)
    check(lora.steps.is_whole(), Code::invalid_config,
          "lora_steps is given; expected none: merged weights are the same in all steps");
  s.texts = folder.files();
  s.texts.merge(folder.tokenizer_files());
  for (const auto& [name, component] : folder.components())
    if (k.component.empty() || name == k.component) s.parts.push_back(part_of(folder, name));
  if (s.parts.empty()) part_of(folder, k.component);  // throws, listing the existing components
  return s;
}

/// Replaces moving averages by the trained weights, if the checkpoint's weights are averages.
void replace_averages(const Source& s, const Part& part, ArraysToWrite& values, int64_t& replaced) {
  const NamedShards state = read_training_state(s.path).state;
  for (const auto& [average, shards] : state) {
    const std::string ema = state_prefix::kAverage, beginning = ema + part.name + "/";
    if (!average.starts_with(beginning)) continue;
    const std::string input = average.substr(ema.size());
    const auto trained = state.find(input), master = state.find(state_prefix::kMaster + input);
    check(trained != state.end() || master != state.end(), Code::io,
          "'{}' holds the average of '{}', but not what was trained", s.path, input);
    for (const auto& [path, array] :
         unstacked(average.substr(beginning.size()), (trained != state.end() ? trained : master)->second)) {
      ArrayToWrite& value = values.at(path);
      value.make = [array = array, type = value.shape.dtype] { return cast_and_release(array.whole(), type); };
      ++replaced;
    }
  }
}

/// Stored values by published name; shards are merged when they are written.
ArraysToWrite stored(const Part& p) {
  if (!p.shards)
    return open_each_stored(p.params, p.name, *p.opened->take(p.name, p.weights), p.weights, p.weight_names);
  ArraysToWrite out;
  const auto mutex = std::make_shared<std::mutex>();
  for (const Param& param : p.params.params())
    for (int64_t i = 0; i < std::max<int64_t>(param.stacked, 1); ++i) {
      const std::string path = param.stacked > 0 ? layer_path(param.path, i) : param.path;
      const std::string array = array_of_weight(p.name, path);
      out[path] = {p.shards->shape(array), [shards = p.shards, array, mutex] {
                     const std::lock_guard lock(*mutex);
                     return shards->read(array).whole();
                   }};
    }
  return out;
}

/// Values by published name, as requested by the keys.
ArraysToWrite read(const Source& s, const Part& part, const ConvertKeys& k, int64_t& replaced) {
  ArraysToWrite values = stored(part);
  if (!s.loras.empty()) {
    const auto sums = std::make_shared<const LoraSums>(s.loras, part.params);
    for (auto& [path, array] : values)
      array.make = [make = array.make, sums, component = part.name, path = path,
                    wide = !k.dtype.empty() && !k.quantizes() && is_float(array.shape.dtype)] {
        const HostArray stored = make(), before = wide ? cast_and_release(stored, DType::f32) : stored;
        HostArray sum = sums->added(component, path, before);
        if (sum.data() != before.data()) release_pages(before.data(), before.bytes());
        return sum;
      };
  }
  if (!k.ema) replace_averages(s, part, values, replaced);
  if (!k.dtype.empty() && !k.quantizes())
    for (auto& [name, array] : values) {
      if (!is_float(array.shape.dtype)) continue;
      array.shape.dtype = parse_dtype(k.dtype);
      array.make = [make = array.make, type = array.shape.dtype] { return cast_and_release(make(), type); };
    }
  return values;
}

constexpr const char* kGguf = ".gguf";

/// Null for types that tensors have or are converted to when they are read.
const GgufType* gguf_type(const std::string& dtype) { return find_written_gguf_type(dtype); }
bool is_scaled_float8(const ConvertKeys& k) { return k.quantizes() && !gguf_type(k.dtype); }

/// The name of a parameter in the original layout, after `prefix`; `gguf`: in GGUF files.
WeightAlias original_of(const Part& part, const std::string& name, const std::string& prefix, bool gguf) {
  if (gguf && part.weight_names.gguf_name) return {.name = part.weight_names.gguf_name(name)};
  if (part.weight_names.aliases)
    for (const WeightAlias& other : part.weight_names.aliases(name))
      if (other.prefix == prefix) return other;
  fail(Code::invalid_config, "{}: '{}' has no name in the original layout{}", part.name, name,
       prefix.empty() ? "" : " with the prefix '" + prefix + "'");
}

/// Adds `values` under the original names to a file's arrays; parts of one array are merged when it is written.
void add_original(const Part& part, const ArraysToWrite& values, const std::string& prefix, bool gguf,
                  ArraysToWrite& out) {
  struct Parts {
    int64_t parts;
    std::vector<std::pair<std::vector<int64_t>, std::function<HostArray()>>> of;
  };
  std::map<std::string, std::shared_ptr<Parts>> joined;
  for (const auto& [name, array] : values) {
    const WeightAlias other = original_of(part, name, prefix, gguf);
    const std::string key = other.full_name();
    Shape shape = array.shape;
    if (other.transposed) std::swap(shape.dims.at(0), shape.dims.at(1));
    shape.dims.insert(shape.dims.end(), static_cast<size_t>(other.ones), 1);
    const auto make = [make = array.make, transpose = other.transposed, dims = shape.dims] {
      return (transpose ? transposed(make()) : make()).reshaped(dims);
    };
    if (other.parts == 1) {
      check(out.emplace(key, ArrayToWrite{shape, make}).second, Code::internal, "convert: '{}' is written twice", key);
      continue;
    }
    shape.dims[0] = shape.dims[0] / std::ssize(other.part) * other.parts;
    auto& parts = joined[key];
    if (!parts) {
      parts = std::make_shared<Parts>(Parts{other.parts, {}});
      out[key] = {shape, [shape, parts] {
                    HostArray whole(shape);
                    for (const auto& [which, make] : parts->of) {
                      const HostArray some = make();
                      set_parts(whole, which, parts->parts, some);
                      release_pages(some.data(), some.bytes());
                    }
                    return whole;
                  }};
    }
    check(out.at(key).shape == shape, Code::io, "convert: the parts of '{}' are of different sizes or types", key);
    parts->of.emplace_back(other.part, make);
  }
}

/// Prefix of a single model's names in a file: empty if such files exist, else the usual prefix.
std::string lone_prefix(const Part& part) {
  const std::vector<WeightAlias> names = part.weight_names.aliases
                                             ? part.weight_names.aliases(part.params.params().at(0).path)
                                             : std::vector<WeightAlias>();
  check(!names.empty(), Code::invalid_config, "{} has no original layout; write it with format=diffusers", part.name);
  const bool bare = std::ranges::any_of(names, [](const WeightAlias& n) { return n.prefix.empty(); });
  return bare ? "" : names[0].prefix;
}

/// Logs what was converted, without a run's LoRA matrices.
class Writer {
 public:
  Writer(const Source& s, const ConvertKeys& k) : s_(s), k_(k), whole_(!s.texts.empty() && k.component.empty()) {}

  void single_file(const std::string& to) {
    check(!s_.loras.empty() || !exists(s_.path + "/" + kLora), Code::invalid_config,
          "'{}' holds LoRA matrices, which a single file cannot hold; try: lora merge", s_.path);
    check(!whole_ || !s_.single_file.prefixes.empty(), Code::invalid_config,
          "models of '{}' have no single-file layout; give component=NAME, or format=diffusers", s_.path);
    const bool gguf = to.ends_with(kGguf);
    std::string architecture;
    for (const Part& part : s_.parts)
      if (architecture.empty()) architecture = part.weight_names.architecture;
    check(!gguf || !architecture.empty(), Code::invalid_config,
          "'{}': models of '{}' have no names in GGUF files; expected a denoiser, or a T5 or Qwen encoder: "
          "component=NAME, or a "
          "name that ends in .safetensors",
          to, s_.path);
    ArraysToWrite out = to_write(whole_ ? s_.single_file.extra_tensors : HostArrays());
    std::vector<std::string> left;
    for (const Part& part : s_.parts) {
      const auto prefix = s_.single_file.prefixes.find(part.name);
      if (whole_ && prefix == s_.single_file.prefixes.end())
        left.push_back(part.name);
      else
        add_original(part, values(part), whole_ ? prefix->second : lone_prefix(part), gguf, out);
    }
    finish_reading();
    if (!left.empty())
      log_warning("{}: not written: single files do not hold it; component=NAME writes it alone",
                  fmt::join(left, ", "));
    const fs::path parent = fs::path(to).parent_path();
    if (!parent.empty()) make_folders(parent.string());
    if (gguf)
      write_gguf(to, out, gguf_type(k_.dtype), architecture);
    else
      write_safetensors(to, is_scaled_float8(k_) ? with_scaled_float8(out, float8_prefix()) : out);
    log_info("{}: the original layout", to);
    if (whole_) log_info("for a model whose sizes are not published, read it with single_file_config={}", s_.path);
  }

  void diffusers(const std::string& to) {
    const std::string temporary = new_folder_next_to(to);
    try {
      for (const Part& part : s_.parts) {
        const std::string folder = whole_ ? temporary + "/" + part.name : temporary;
        make_folders(folder);
        write_file_atomic(folder + "/config.json", part.config);
        write_sharded_safetensors(folder, part.stem, values(part));
      }
      finish_reading();
      for (const auto& [path, text] : whole_ ? s_.texts : std::map<std::string, std::string>()) {
        make_folders((fs::path(temporary) / path).parent_path().string());
        write_file_atomic(temporary + "/" + path, text);
      }
      for (const char* file : {kLora, "lora_kohya.safetensors", "lora_comfyui.safetensors"})
        if (whole_ && s_.loras.empty() && exists(s_.path + "/" + file))
          fs::copy_file(s_.path + "/" + file, temporary + "/" + file);
      rename_durable(temporary, to);
    } catch (...) {
      std::error_code ec;
      fs::remove_all(temporary, ec);
      throw;
    }
    log_info("{}: in diffusers' layout", to);
  }

 private:
  /// Prefix of the denoiser's names, which precedes the mark of scaled float8.
  std::string float8_prefix() const {
    for (const Part& part : s_.parts)
      if (const auto p = s_.single_file.prefixes.find(part.name);
          whole_ && p != s_.single_file.prefixes.end() && !part.weight_names.architecture.empty())
        return p->second;
    return "";
  }
  ArraysToWrite values(const Part& part) {
    ArraysToWrite v = read(s_, part, k_, replaced_);
    int64_t bytes = 0;
    for (const auto& [name, array] : v) bytes += array.shape.bytes();
    log_info("{}{}: {} tensors, {:.1f} MB", part.name, part.name.empty() ? "weights" : "", v.size(),
             static_cast<double>(bytes) / 1e6);
    return v;
  }
  void finish_reading() const {
    check(k_.ema || replaced_ > 0, Code::invalid_config,
          "ema=false: '{}' has no averaged weights; expected a checkpoint of a run with ema_decay", s_.path);
  }

  const Source& s_;
  const ConvertKeys& k_;
  bool whole_;
  int64_t replaced_ = 0;
};

}  // namespace

bool ConvertKeys::quantizes() const {
  return find_written_gguf_type(dtype) || dtype == "float8_e4m3fn" || dtype == to_string(DType::f8e4m3fn);
}

ModelFolder open_folder(const std::string& from, const FolderKeys& keys) {
  return ModelFolder::open(place_of(copied(from), keys), keys);
}

ArraysToWrite stored_values(const ModelFolder& folder, const std::string& component) {
  return stored(part_of(folder, component));
}

void convert(const std::string& source, const std::string& to, const ConvertKeys& k,
             const std::optional<LoraKeys>& loras) {
  if (is_remote(to)) {
    check(list_all_files(to).empty(), Code::invalid_config, "'{}' exists; expected a new name", shown(to));
    remove_folder(local_cache_path(to));
    make_folders(fs::path(local_cache_path(to)).parent_path());
    convert(source, local_cache_path(to), k, loras);
    return RemoteSync({{local_cache_path(to), to}}, {}).settle();
  }
  const std::string from = copied(source);
  const bool single =
      k.format.empty() ? to.ends_with(".safetensors") || to.ends_with(kGguf) : k.format == "single_file";
  check(!single || to.ends_with(".safetensors") || to.ends_with(kGguf), Code::invalid_config,
        "'{}' does not end in .safetensors or .gguf, as a single file does", to);
  for (const char* other : {".ckpt", ".pt", ".pth", ".bin"})
    check(!to.ends_with(other), Code::invalid_config,
          "'{}': {} files are not written; expected a name that ends in .safetensors or .gguf, or a folder", to, other);
  check(!exists(to), Code::invalid_config, "'{}' exists; expected a new name", to);
  check(single || !to.ends_with(kGguf), Code::invalid_config,
        "'{}' is GGUF, but format is {}; expected format=single_file", to, k.format);
  if (gguf_type(k.dtype))
    check(to.ends_with(kGguf), Code::invalid_config,
          "dtype is {}, a type of GGUF; expected a name that ends in .gguf: '{}'", k.dtype, to);
  else if (!k.dtype.empty())
    check(
        size_of(parse_float_dtype("dtype", k.dtype, {"q8_0", "q4_0"})) > 1 ||
            (k.quantizes() && single && !to.ends_with(kGguf)),
        Code::invalid_config,
        "dtype is {} and '{}' is to be written; expected float32, bfloat16 or float16, or of single .safetensors files "
        "float8_e4m3fn, or of .gguf files q8_0 or q4_0",
        k.dtype, to);
  const Source s = open_source(from, k, loras);
  check(!is_inside(to, s.path), Code::invalid_config, "'{}' is inside of '{}', the input; expected a place outside", to,
        s.path);
  check(!loras || !s.loras.empty(), Code::invalid_config,
        "lora_files is empty; expected a LoRA file, or a checkpoint that was trained with train_lora");
  check(k.ema || exists(s.path + "/training_state/state.json"), Code::invalid_config,
        "ema=false: '{}' is not a checkpoint of a run", from);
  Writer writer(s, k);
  single ? writer.single_file(to) : writer.diffusers(to);
}

}  // namespace md
