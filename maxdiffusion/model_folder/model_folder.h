// Opens a model folder in diffusers' layout: model_index.json maps subfolders to classes, each config is parsed by its
// class (models/registry.h), tokenizers are loaded, and weights are located but not read.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <any>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/model_folder/opened_weights.h"
#include "maxdiffusion/models/registry.h"
#include "maxdiffusion/nn/param.h"
#include "maxdiffusion/tokenizers/placeholders.h"
#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

/// A model of the folder.
struct Component {
  std::string class_name;  // "UNet2DConditionModel"
  std::any config;         // the class's config struct
  std::string weights;     // folder or file of its weights; empty: the single file has none of them
  std::string config_file, config_text;
};
/// Names of a component's parameters in files of other programs.
WeightNameMap weight_names(const Component& component);
/// The text of a config.json without its quantization settings: the tensors describe their quantization, and are
/// dequantized when they are read.
std::string unquantized(const std::string& config);

/// Keys that describe a model folder, in addition to its name.
struct FolderKeys {
  std::string single_file_config, variant, revision, clip_bpe_file;
  template <class V>
  void visit(V&& v) {
    v("single_file_config", single_file_config,
      "model folder whose configs and tokenizers a single .safetensors file is read with; empty: the configs of the "
      "published model",
      KeyPath::input);
    v("variant", variant,
      "variant of the weight files that is read if the folder has it, such as fp16; empty: the plain ones");
    v("revision", revision, "branch, tag or commit of a name on the hub; empty: main");
    v("clip_bpe_file", clip_bpe_file, "merges list for a model folder without tokenizer; empty: the installed one",
      KeyPath::input);
  }
};

class ModelFolder {
 public:
  /// `name`: as in local_folder, or a single file with all models of a pipeline (single_file.h). Throws io if the
  /// folder or a file is missing, or a single file holds other tensors than its models have; invalid_config, naming the
  /// file, if a config is damaged, names a class that is not registered, or is not valid for its class.
  static ModelFolder open(const std::string& name, const FolderKeys& keys = {});
  /// A folder whose files are passed as texts by relative path ("model_index.json", "unet/config.json", …). It has no
  /// weights and no tokenizers.
  static ModelFolder from_texts(std::map<std::string, std::string> files);

  /// Path of the folder, or of the single file.
  const std::string& path() const { return path_; }
  /// `_class_name` of model_index.json: "StableDiffusionXLPipeline".
  const std::string& pipeline() const { return pipeline_; }
  /// A member of model_index.json that is not a component: "force_zeros_for_empty_prompt". T: bool, int64_t, double
  /// or std::vector<int64_t>.
  template <class T>
  T option(const char* name, T fallback) const;
  /// Replaces or adds such a member in memory; files are unchanged.
  void set_option(const char* name, int64_t value);
  void set_option(const char* name, const std::vector<int64_t>& value);

  const std::map<std::string, Component>& components() const { return components_; }
  bool has(const std::string& component) const { return components_.contains(component); }
  /// Throws invalid_config if the folder has no such component, or its class is not Config's.
  template <class Config>
  const Config& config(const std::string& component) const {
    const Component& c = find(component);
    const Config* config = std::any_cast<Config>(&c.config);
    check(config, Code::invalid_config, "{}: {} is a {}, which a {} does not have there", path_, component,
          c.class_name, pipeline_);
    return *config;
  }
  /// Throws invalid_config if the folder has no such component, or it is not an autoencoder of videos (`videos`) or
  /// images.
  std::shared_ptr<const Autoencoder> autoencoder(const std::string& component, bool videos = false) const;
  /// Throws invalid_config if model_index.json names no such tokenizer. Null after from_texts.
  std::shared_ptr<const Tokenizer> tokenizer(const std::string& name) const;

  /// Texts of model_index.json, scheduler/scheduler_config.json, every config.json,
  /// image_processor/preprocessor_config.json (media/image_processor.h) and of a processor's files, by path relative to
  /// the folder.
  const std::map<std::string, std::string>& files() const { return files_; }
  const std::string& scheduler_config() const { return files_.at("scheduler/scheduler_config.json"); }
  /// Words that mean learned embeddings of a text encoder; files are unchanged.
  void set_placeholders(const std::string& component, std::vector<Placeholder> placeholders) {
    placeholders_[component] = std::move(placeholders);
  }
  std::vector<Placeholder> placeholders(const std::string& component) const {
    const auto found = placeholders_.find(component);
    return found == placeholders_.end() ? std::vector<Placeholder>() : found->second;
  }
  /// Texts of the tokenizers' files in transformers' format, by path relative to the folder.
  std::map<std::string, std::string> tokenizer_files() const;

  /// Adds a model from another folder: `folder` has weights, and a config.json whose _class_name is the model's class.
  void add_component(const std::string& name, const std::string& folder);
  /// Adds a model with weights from a file and the text of a config.json.
  void add_component(const std::string& name, const std::string& file, const std::string& config);
  /// Does nothing if there is none of this name.
  void remove_component(const std::string& name);
  /// Replaces a component's config.json. `from`: the file of the text, for messages; empty: the folder itself.
  /// `class_name`: of the config; empty: the component's.
  void set_config(const std::string& component, const std::string& text, const std::string& from = "",
                  const std::string& class_name = "");
  /// Changes the scheduler's config as the marks in a denoiser's file say (the tensors v_pred and ztsnr); files are
  /// unchanged. `warn`: names in a warning each field that is not as the folder has it.
  void take_marks(const std::string& file, const SafetensorsReader& reader, bool warn);
  WeightNameMap weight_names(const std::string& component) const { return md::weight_names(find(component)); }
  /// Weights of this folder's components that are open.
  const std::shared_ptr<OpenedWeights>& opened() const { return opened_; }
  /// The table of a component's parameters.
  ParamTable params(const std::string& component, const ScopeOptions& options = {}) const;
  /// One table of the parameters of several components.
  ParamTable params(const std::vector<std::string>& components, const ScopeOptions& options = {}) const;

 private:
  using Read = std::function<std::string(const std::string& file)>;
  void read_index(const std::string& folder, const Read& read);
  void read_model(const std::string& part, const std::string& class_name, const std::string& folder, const Read& read);
  void open_tokenizers(const std::string& folder, const FolderKeys& keys);
  void choose_variant(const std::string& variant);
  void open_single_file(const FolderKeys& keys);
  void change_option(const char* name, const nlohmann::json& value);
  const Component& find(const std::string& component) const;
  std::string place_of(const std::string& file) const;
  static std::any parse(const std::string& class_name, const std::string& text, const std::string& where);

  std::string path_, pipeline_;
  std::shared_ptr<const nlohmann::json> index_;
  std::map<std::string, Component> components_;
  std::map<std::string, std::string> tokenizer_classes_;
  std::map<std::string, std::shared_ptr<const Tokenizer>> tokenizers_;
  std::map<std::string, std::vector<Placeholder>> placeholders_;  // by text encoder
  std::map<std::string, std::string> files_;
  std::shared_ptr<OpenedWeights> opened_ = std::make_shared<OpenedWeights>();
};

template <>
bool ModelFolder::option(const char* name, bool fallback) const;
template <>
int64_t ModelFolder::option(const char* name, int64_t fallback) const;
template <>
double ModelFolder::option(const char* name, double fallback) const;
template <>
std::vector<int64_t> ModelFolder::option(const char* name, std::vector<int64_t> fallback) const;

}  // namespace md
