#include "maxdiffusion/model_folder/model_folder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <tuple>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/model_folder/single_file.h"
#include "maxdiffusion/storage/hub_cache.h"
#include "maxdiffusion/tokenizers/clip_tokenizer.h"

namespace md {
namespace {

using nlohmann::json;

constexpr std::string_view kImageProcessors[] = {"CLIPImageProcessor", "CLIPImageProcessorFast",
                                                 "CLIPImageProcessorPil", "CLIPFeatureExtractor"};
/// Unsupported model classes, and their descriptions for messages.
constexpr std::pair<std::string_view, std::string_view> kMissing[] = {
    {"Mistral3ForConditionalGeneration",
     "the text encoder of FLUX.2-dev, Mistral, is not supported; FLUX.2-klein, whose text encoder is Qwen3, is"},
    {"ControlNetUnionModel", "ControlNets of several kinds of control images (union) are not supported"},
    {"ControlNetXSAdapter", "ControlNet-XS is not supported"},
    {"FluxControlNetModel", "ControlNets of FLUX.1 are not supported"},
    {"FluxMultiControlNetModel", "ControlNets of FLUX.1 are not supported"},
    {"QwenImageControlNetModel", "ControlNets of Qwen-Image are not supported"},
    {"QwenImageMultiControlNetModel", "ControlNets of Qwen-Image are not supported"},
    {"ZImageControlNetModel", "ControlNets of Z-Image are not supported"},
    {"MultiAdapter", "several T2I-Adapters are not supported; one is"},
    {"MotionAdapter", "motion modules (AnimateDiff) are not supported"},
    {"UNetMotionModel", "motion modules (AnimateDiff) are not supported"},
    {"WanVACETransformer3DModel", "Wan VACE is not supported"},
    {"WanAnimateTransformer3DModel", "Wan Animate is not supported"},
    {"DPTForDepthEstimation", "UNets that take a depth map are not supported"},
    {"StableUnCLIPImageNormalizer", "UNets that take the embeddings of an image (unCLIP) are not supported"}};
/// Classes of components that sampling and training do not use.
constexpr std::string_view kUnused[] = {"StableDiffusionSafetyChecker", "FlaxStableDiffusionSafetyChecker"};
/// Processors: an image processor and a tokenizer in one folder.
constexpr std::string_view kProcessors[] = {"Qwen2VLProcessor", "Qwen2_5_VLProcessor"};

/// The class of several models in one part of the index, and the class of each.
constexpr std::pair<const char*, const char*> kControlNets = {"MultiControlNetModel", "ControlNetModel"};

/// Names of the text files that are directly in a folder, sorted.
std::vector<std::string> text_files(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& f : std::filesystem::directory_iterator(folder, none))
    for (const char* end : {".json", ".jinja", ".txt", ".model"})
      if (f.is_regular_file(none) && f.path().extension() == end) names.push_back(f.path().filename());
  std::ranges::sort(names);
  return names;
}

json json_of(const std::string& path, const std::string& text) {
  try {
    return parse_json(text);
  } catch (const json::exception& e) {
    fail(Code::invalid_config, "{}: not JSON: {}", path, e.what());
  }
}

/// The class of a tokenizer: the one in model_index.json or, if that is not supported, the one in the tokenizer's
/// config.
std::string tokenizer_class(const std::string& folder, const std::string& in_index) {
  const std::string file = folder + "/tokenizer_config.json";
  const bool any = in_index == "TokenizersBackend" || in_index == "PreTrainedTokenizerFast";  // any tokenizer.json
  if ((is_tokenizer_class(in_index) && !any) || !exists(file)) return in_index;
  const json config = json_of(file, read_file(file));
  const json name = config.is_object() ? config.value("tokenizer_class", json()) : json();
  return name.is_string() && (!any || is_tokenizer_class(name)) ? name.get<std::string>() : in_index;
}

/// Throws io if a file of a tokenizer's folder may not be read, or is a link to none: it would be taken for missing,
/// and CLIP's vocabulary used in its place.
void check_tokenizer_files(const std::string& folder) {
  if (const std::optional<Error> e = unreadable_in(folder)) throw *e;
  std::error_code ec;
  for (const auto& f : std::filesystem::directory_iterator(folder, ec))
    if (const auto to = std::filesystem::read_symlink(f.path(), ec); !ec && !exists(f.path()))
      throw Error(Code::io, fmt::format("'{}' is a link to '{}', which does not exist: its download is incomplete",
                                        f.path().string(), to.string()))
          .note("try: download the model again; files that are whole are kept");
}

/// Opens a tokenizer. CLIP's folder may be missing, because its vocabulary is always the same. `zero`: pads with token
/// 0, as OpenCLIP does. `length`: tokens that the text encoder takes.
std::shared_ptr<const Tokenizer> open_any_tokenizer(const std::string& class_name, const std::string& folder, bool zero,
                                                    int64_t length, std::string bpe_file) {
  check_tokenizer_files(folder);
  const bool has_vocabulary = exists(folder + "/vocab.json") || exists(folder + "/tokenizer.json");
  if (!class_name.starts_with("CLIP") || has_vocabulary) return open_tokenizer(class_name, folder);
  if (constexpr const char* kVocabulary = "open_clip/bpe_simple_vocab_16e6.txt.gz"; bpe_file.empty()) {
    bpe_file = wheel_file(kVocabulary);
    check(!bpe_file.empty(), Code::io, "CLIP's vocabulary: no {} in '{}'; it is installed with the program",
          kVocabulary, fmt::join(wheel_folders(), "', '"));
  }
  auto t = std::make_shared<ClipTokenizer>(ClipTokenizer::from_bpe(bpe_file));
  if (zero && !exists(folder)) t->set_pad_id(0);  // "!"
  t->set_max_length(length);
  return t;
}

/// The number of tokens that the text encoder of tokenizer `part` takes.
int64_t text_length(const std::map<std::string, std::string>& files, const std::string& part) {
  constexpr int64_t kClip = 77;
  std::string encoder = part;
  if (const size_t at = part.find("tokenizer"); at != part.npos)
    encoder.replace(at, std::strlen("tokenizer"), "text_encoder");
  const auto text = files.find(encoder + "/config.json");
  const json config = text == files.end() ? json() : json_of(text->first, text->second);
  const json length = config.is_object() ? config.value("max_position_embeddings", json()) : json();
  return length.is_number_integer() && length > 0 ? length.get<int64_t>() : kClip;
}

std::string without_flax(const std::string& name) { return name.starts_with("Flax") ? name.substr(4) : name; }

/// Throws unless `in_config`, the member _class_name of `where`, is the class `class_name` of model_index.json.
/// transformers' configs have no such member.
void check_class(const std::string& class_name, const json& in_config, const std::string& where) {
  if (in_config.is_null()) return;
  const bool same = in_config.is_string() && without_flax(in_config) == without_flax(class_name);
  check(same, Code::invalid_config, "{}: _class_name is {}, but model_index.json says {}; expected one of: {}", where,
        in_config.dump(), class_name, class_name);
}

/// Throws if a member of model_index.json that is not a component looks like one.
void check_option(const std::string& where, const std::string& folder, const std::string& name, const json& value) {
  if (name.starts_with('_')) {
    check(value.is_string() || value.is_null(), Code::invalid_config, "{}: {} is {}; expected a text", where, name,
          value.dump());
    return;
  }
  const bool scalar = value.is_boolean() || value.is_number() || value.is_string() || value.is_null();
  check(scalar && (folder.empty() || !std::filesystem::is_directory(folder + "/" + name)), Code::invalid_config,
        "{}: {} is {}; expected [library, class]{}", where, name, value.dump(),
        scalar ? ", since there is a folder of that name" : "");
}

}  // namespace

std::string unquantized(const std::string& config) {
  constexpr const char* kField = "quantization_config";
  if (config.find(kField) == std::string::npos) return config;
  json parsed = parse_json_or_discard(config);
  if (!parsed.is_object() || parsed.erase(kField) == 0) return config;
  return dump_json(std::move(parsed), 2) + "\n";
}

std::string ModelFolder::place_of(const std::string& file) const { return path_.empty() ? file : path_ + "/" + file; }

std::any ModelFolder::parse(const std::string& class_name, const std::string& text, const std::string& where) {
  try {
    const json config = json_of(where, text);
    check_class(class_name, config.is_object() ? config.value("_class_name", json()) : json(), where);
    return find_model_class(class_name)->read(config);
  } catch (Error& e) {
    throw e.note("in " + where);
  } catch (const json::exception& e) {
    fail(Code::invalid_config, "{}: {}", where, e.what());
  }
}

void ModelFolder::read_model(const std::string& part, const std::string& class_name, const std::string& folder,
                             const Read& read) {
  const std::string config = part + "/config.json";
  read(config);
  const std::string text = files_.at(config) = unquantized(files_.at(config));
  components_[part] = {class_name, parse(class_name, text, place_of(config)), folder + "/" + part,
                       folder + "/" + config, text};
}

void ModelFolder::read_index(const std::string& folder, const Read& read) {
  const std::string where = folder + "/model_index.json";
  index_ = std::make_shared<const json>(json_of(where, files_["model_index.json"] = read("model_index.json")));
  check(index_->is_object(), Code::invalid_config, "{}: expected a JSON object, found {}", where, index_->type_name());
  const json name = index_->value("_class_name", json());
  check(name.is_string(), Code::invalid_config, "{}: _class_name is {}; expected the name of a pipeline class", where,
        name.dump());
  pipeline_ = name;
  for (const auto& [part, value] : index_->items()) {
    if (!value.is_array()) {  // an option of the pipeline
      check_option(where, path_, part, value);
      continue;
    }
    check(value.size() == 2 && value[0].type() == value[1].type() && (value[1].is_null() || value[1].is_string()),
          Code::invalid_config, "{}: {} is {}; expected [library, class]", where, part, value.dump());
    if (value[1].is_null()) continue;
    check(!part.empty() && part.find_first_of("/\\") == std::string::npos && part[0] != '.', Code::invalid_config,
          "{}: '{}' is not the name of a folder inside the model's", where, part);
    const std::string class_name = value[1];
    if (part == "scheduler") {
      const std::string config = folder + "/scheduler/scheduler_config.json";
      const json scheduler = json_of(config, read("scheduler/scheduler_config.json"));
      check(scheduler.is_object(), Code::invalid_config, "{}: expected a JSON object, found {}", config,
            scheduler.type_name());
      check_class(class_name, scheduler.value("_class_name", json()), config);
    } else if (class_name == kControlNets.first) {
      // The first is in the folder of the part, others in folders that end in their numbers.
      read_model(part, kControlNets.second, folder, read);
      for (int i = 1;; ++i) {
        const std::string next = fmt::format("{}_{}", part, i), config = next + "/config.json";
        if (!exists(folder + "/" + config) && !files_.contains(config)) break;
        read_model(next, kControlNets.second, folder, read);
      }
    } else if (find_model_class(class_name)) {
      read_model(part, class_name, folder, read);
    } else if (std::ranges::count(kProcessors, class_name) > 0) {  // before tokenizers: it may hold one's files
      for (const std::string& file : text_files(folder + "/" + part)) read(part + "/" + file);
    } else if (const std::string name = tokenizer_class(folder + "/" + part, class_name); is_tokenizer_class(name)) {
      tokenizer_classes_[part] = name;
    } else if (std::ranges::count(kImageProcessors, class_name) > 0) {
      // Under other names ("feature_extractor") it prepares images for safety checkers.
      if (part == "image_processor") read(part + "/preprocessor_config.json");
    } else if (std::ranges::count(kUnused, class_name) == 0) {
      for (const auto& [missing, why] : kMissing)
        check(class_name != missing, Code::invalid_config, "{}: {} is a {}: {}", where, part, class_name, why);
      std::vector<std::string> known = model_class_names();
      const std::vector<std::string> tokenizers = tokenizer_class_names();
      known.insert(known.end(), tokenizers.begin(), tokenizers.end());
      fail(Code::invalid_config, "{}: the class of {} is '{}'; expected one of: {}", where, part, class_name,
           nearest_first(class_name, known));
    }
  }
  check(files_.contains("scheduler/scheduler_config.json"), Code::invalid_config,
        "{}: there is no scheduler; expected \"scheduler\": [\"diffusers\", \"…Scheduler\"]", where);
}

template <>
bool ModelFolder::option(const char* name, bool fallback) const {
  return index_->value(name, fallback);
}
template <>
int64_t ModelFolder::option(const char* name, int64_t fallback) const {
  return index_->value(name, fallback);
}
template <>
double ModelFolder::option(const char* name, double fallback) const {
  return index_->value(name, fallback);
}

template <>
std::vector<int64_t> ModelFolder::option(const char* name, std::vector<int64_t> fallback) const {
  const auto found = index_->find(name);
  return found == index_->end() ? std::move(fallback) : found->get<std::vector<int64_t>>();
}

void ModelFolder::set_option(const char* name, int64_t value) { change_option(name, value); }
void ModelFolder::set_option(const char* name, const std::vector<int64_t>& value) { change_option(name, value); }

void ModelFolder::change_option(const char* name, const json& value) {
  json changed = *index_;
  changed[name] = value;
  index_ = std::make_shared<const json>(std::move(changed));
}

void ModelFolder::open_tokenizers(const std::string& folder, const FolderKeys& keys) {
  for (const auto& [part, name] : tokenizer_classes_) {
    const auto config = files_.find(part + "/tokenizer_config.json");  // a published model's, without a folder
    const bool zero =
        part != "tokenizer" || (config != files_.end() && config->second.find("\"!\"") != std::string::npos);
    tokenizers_[part] =
        open_any_tokenizer(name, folder + "/" + part, zero, text_length(files_, part), keys.clip_bpe_file);
    files_.erase(part + "/tokenizer_config.json");  // the tokenizer has its own copy
  }
}

void ModelFolder::choose_variant(const std::string& variant) {
  if (variant.empty()) return;
  size_t found = 0;
  for (auto& [name, component] : components_)
    if (const std::string file = file_of_variant(component.weights, variant); !file.empty())
      component.weights = file, ++found;
  check(found > 0, Code::io, "'{}' has no weights of the variant '{}'; such files are called model.{}.safetensors",
        path_, variant, variant);
}

void ModelFolder::open_single_file(const FolderKeys& keys) {
  const OpenedWeights::File file = OpenedWeights::open(path_);
  const HostArrays& tensors = file->tensors();
  const SingleFileLayout& layout = find_single_file_layout(path_, tensors);
  std::string folder;
  if (!keys.single_file_config.empty()) {
    folder = local_folder(keys.single_file_config, keys.revision);
    read_index(folder, [&](const std::string& file) { return files_[file] = read_file(folder + "/" + file); });
  } else {
    const std::map<std::string, std::string> texts = layout.texts(tensors);
    files_ = texts;
    read_index(path_, [&](const std::string& file) { return texts.at(file); });
  }
  for (auto& [name, component] : components_) component.weights = path_;
  const std::set<std::string> absent = check_single_file(*this, layout, *file);
  for (auto& [name, component] : components_)
    if (absent.contains(name))
      component.weights.clear();
    else
      opened_->keep(name, path_, file);
  open_tokenizers(folder, keys);
  take_marks(path_, *file, !folder.empty());
}

void ModelFolder::take_marks(const std::string& file, const SafetensorsReader& reader, bool warn) {
  constexpr const char* kConfig = "scheduler/scheduler_config.json";
  json scheduler = json_of(place_of(kConfig), files_.at(kConfig));
  const std::tuple<const char*, const char*, json, json> marks[] = {
      {kVelocityMark, "prediction_type", "v_prediction", "epsilon"},
      {kZeroSnrMark, "rescale_betas_zero_snr", true, false}};
  for (const auto& [mark, field, value, usual] : marks) {
    const json before = scheduler.value(field, usual);
    if (!reader.tensors().contains(mark) || before == value) continue;
    if (warn)
      log_warning("'{}' holds the tensor {}: {} is {}, not {} as in the folder's scheduler_config.json", file, mark,
                  field, value.dump(), before.dump());
    scheduler[field] = value;
    files_[kConfig] = scheduler.dump(2) + "\n";
  }
  const auto prediction = reader.metadata().find("modelspec.prediction_type");
  if (prediction != reader.metadata().end() && prediction->second == "v" &&
      scheduler.value("prediction_type", json("epsilon")) == "epsilon")
    log_warning(
        "'{}': its metadata says modelspec.prediction_type v, and it has no tensor v_pred: it is read as a model that "
        "predicts noise unless prediction_type=v_prediction is given",
        file);
}

ModelFolder ModelFolder::open(const std::string& name, const FolderKeys& keys) {
  check(!name.empty(), Code::invalid_config,
        "pretrained_model_name_or_path is empty; expected a model folder, a name on the hub (owner/name) or a "
        ".safetensors file");
  ModelFolder m;
  if (std::filesystem::is_regular_file(name)) {
    m.path_ = name;
    m.open_single_file(keys);
    return m;
  }
  check(keys.single_file_config.empty(), Code::invalid_config,
        "single_file_config is given; expected none: '{}' is a folder, with configs of its own", name);
  m.path_ = local_folder(name, keys.revision, "models", keys.variant);
  if (!exists(m.path_ + "/model_index.json"))
    throw Error(Code::io, fmt::format("'{}' is a folder without model_index.json; "
                                      "expected a model folder as diffusers saves it, or a .safetensors file",
                                      m.path_))
        .note(fmt::format("try: ls {}, and give the folder below it that has model_index.json; or owner/name for a "
                          "model of the hub",
                          m.path_));
  verify_checksums(m.path_, "", ChecksumsOf::all_but_weights);  // for checkpoints; weights when they are read
  m.read_index(m.path_, [&m](const std::string& file) { return m.files_[file] = read_file(m.path_ + "/" + file); });
  m.choose_variant(keys.variant);
  m.open_tokenizers(m.path_, keys);
  return m;
}

ModelFolder ModelFolder::from_texts(std::map<std::string, std::string> files) {
  ModelFolder m;
  m.files_ = std::move(files);
  m.read_index("", [&m](const std::string& file) {
    const auto text = m.files_.find(file);
    check(text != m.files_.end(), Code::io, "model folder: no {}", file);
    return text->second;
  });
  return m;
}

const Component& ModelFolder::find(const std::string& component) const {
  const auto c = components_.find(component);
  if (c != components_.end()) return c->second;
  std::vector<std::string> names;
  for (const auto& [name, other] : components_) names.push_back(name);
  fail(Code::invalid_config, "{}: model_index.json has no {}; a {} needs it, it has: {}", path_, component, pipeline_,
       fmt::join(names, ", "));
}

std::shared_ptr<const Autoencoder> ModelFolder::autoencoder(const std::string& component, bool videos) const {
  const Component& c = find(component);
  const ModelClass* known = find_model_class(c.class_name);
  const std::shared_ptr<Autoencoder> autoencoder = known->autoencoder ? known->autoencoder(c.config) : nullptr;
  check(autoencoder && videos == (autoencoder->frame_scale > 0), Code::invalid_config,
        "{}: {} is a {}, which a {} does not have there", path_, component, c.class_name, pipeline_);
  autoencoder->component = component;
  return autoencoder;
}

std::shared_ptr<const Tokenizer> ModelFolder::tokenizer(const std::string& name) const {
  if (path_.empty()) return nullptr;
  const auto t = tokenizers_.find(name);
  check(t != tokenizers_.end(), Code::invalid_config, "{}: model_index.json has no {}; a {} needs it", path_, name,
        pipeline_);
  return t->second;
}

std::map<std::string, std::string> ModelFolder::tokenizer_files() const {
  std::map<std::string, std::string> out;
  for (const auto& [name, t] : tokenizers_)
    for (auto& [file, text] : t->files()) out[name + "/" + file] = std::move(text);
  return out;
}

WeightNameMap weight_names(const Component& c) {
  const ModelClass* known = find_model_class(c.class_name);
  return known->weight_names ? known->weight_names(c.config) : WeightNameMap();
}

void ModelFolder::add_component(const std::string& name, const std::string& folder) {
  add_component(name, folder, read_file(folder + "/config.json"));
}

void ModelFolder::add_component(const std::string& name, const std::string& weights, const std::string& text) {
  const std::string file = weights + (std::filesystem::is_directory(weights) ? "/config.json" : "'s config.json");
  const json config = json_of(file, text);
  const json found = config.is_object() ? config.value("_class_name", json()) : json();
  const ModelClass* known = found.is_string() ? find_model_class(found) : nullptr;
  check(known, Code::invalid_config, "{}: _class_name is {}; expected one of: {}", file, found.dump(),
        nearest_first(found.is_string() ? std::string(found) : "", model_class_names()));
  try {
    components_[name] = {known->name, known->read(config), weights, file, text};
  } catch (Error& e) {
    throw e.note("in " + file);
  }
}

void ModelFolder::remove_component(const std::string& name) { components_.erase(name); }

void ModelFolder::set_config(const std::string& component, const std::string& text, const std::string& from,
                             const std::string& class_name) {
  const std::string file = component + "/config.json";
  Component& c = components_.at(component);
  if (!class_name.empty()) c.class_name = class_name;
  c.config_file = from.empty() ? place_of(file) : from;
  c.config = parse(c.class_name, text, c.config_file);
  files_[file] = c.config_text = text;
}

ParamTable ModelFolder::params(const std::string& component, const ScopeOptions& options) const {
  return params(std::vector<std::string>{component}, options);
}

ParamTable ModelFolder::params(const std::vector<std::string>& components, const ScopeOptions& options) const {
  Graph g;
  ParamTable table;
  for (const std::string& name : components) {
    const Component& c = find(name);
    find_model_class(c.class_name)->trace(Scope(g, table, name, options), c.config);
  }
  return table;
}

}  // namespace md
