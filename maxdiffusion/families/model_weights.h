// The source of each component's weights: the model folder, files that replace them, or random values. Training,
// sampling and checkpoints share it.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/mesh/shards.h"

namespace md {

/// Keys of the model folder and of files that replace its weights.
struct ModelKeys : FolderKeys {
  std::vector<std::string> embeddings, embedding_tokens;
  std::string embeddings_dir;
  std::string pretrained_model_name_or_path, model_name, model_type, unet_checkpoint, lightning_repo, lightning_ckpt,
      vae_file, flux_name, clip_model_name_or_path, t5xxl_model_name_or_path;
  std::string wan_transformer_pretrained_model_name_or_path;
  std::optional<int64_t> max_sequence_length, reference_resolution;
  std::vector<int64_t> text_encoder_out_layers;
  std::string train_expert;
  bool train_new_unet = false, train_new_flux = false, train_new_vae = false, random_text_encoder = false;
  bool names_denoiser_weights() const {
    return !unet_checkpoint.empty() || !lightning_repo.empty() ||
           !wan_transformer_pretrained_model_name_or_path.empty();
  }
  template <class V>
  void visit(V&& v) {
    v("pretrained_model_name_or_path", pretrained_model_name_or_path,
      "model folder in diffusers' layout, a name on the Hugging Face hub (owner/name), or a .safetensors file with all "
      "models in the original layout",
      KeyPath::input_or_word);
    FolderKeys::visit(v);
    v("vae_file", vae_file, "file or folder of an autoencoder in place of the model's, by published or original names",
      KeyPath::input);
    v("model_name", model_name, "what the folder must be, as MaxDiffusion names it; empty: anything");
    v("flux_name", flux_name, "what the folder must be, flux-dev or flux-schnell: MaxDiffusion's key for FLUX.1");
    v("clip_model_name_or_path", clip_model_name_or_path,
      "file, folder or name on the hub of weights in place of the CLIP text encoder's; if not found: the model's, with "
      "a warning",
      KeyPath::input_or_word);
    v("t5xxl_model_name_or_path", t5xxl_model_name_or_path,
      "file, folder or name on the hub of weights in place of the T5 text encoder's; if not found: the model's, with a "
      "warning",
      KeyPath::input_or_word);
    v("model_type", model_type, "what the folder must generate, such as T2V or I2V; empty: anything");
    v("unet_checkpoint", unet_checkpoint,
      "folder with unet/, the UNet's own, or a .safetensors file, whose weights replace the model's",
      KeyPath::input_or_word);
    v("wan_transformer_pretrained_model_name_or_path", wan_transformer_pretrained_model_name_or_path,
      "file or folder whose weights replace the transformer's, by published or original names", KeyPath::input_or_word);
    v("max_sequence_length", max_sequence_length,
      "tokens per caption, for models that take any number; null: the model's");
    v("reference_resolution", reference_resolution,
      "reference images have as many pixels as a square of this side, for models that take any number; null: the "
      "model's",
      at_least(32));
    v("text_encoder_out_layers", text_encoder_out_layers,
      "layers of the text encoder that the denoiser reads, for models that read several; empty: the model's",
      at_least(0));
    v("embeddings", embeddings, "files of learned embeddings (textual inversion): one, a list, or one text with commas",
      KeyPath::input);
    v("embedding_tokens", embedding_tokens,
      "the words of prompts that mean them, one for each of embeddings; empty: the words in the files, or else the "
      "files' names");
    v("embeddings_dir", embeddings_dir, "folder of such files: those that fit this model are read", KeyPath::input);
    v("train_expert", train_expert,
      "which of two denoisers is trained: high (of the noisy steps), low, or both, alternating",
      one_of_or_empty({"high", "low", "both"}));
    v("lightning_repo", lightning_repo, "folder or name on the hub that holds lightning_ckpt; empty: off",
      KeyPath::input_or_word);
    v("lightning_ckpt", lightning_ckpt, "file of a whole UNet whose weights replace the model's");
    v("train_new_unet", train_new_unet, "start the denoiser (UNet, transformer) from random weights");
    v("train_new_flux", train_new_flux,
      "start the denoiser from random weights, as train_new_unet: MaxDiffusion's key for FLUX.1");
    v("train_new_vae", train_new_vae, "train an autoencoder first, from random weights");
    v("random_text_encoder", random_text_encoder, "text encoders of random, frozen weights: for folders without any");
  }
};

/// Whether the denoiser starts from random weights.
bool new_denoiser(const ModelKeys& keys);
/// The set keys that make a component start from random weights.
std::vector<std::string> random_weight_keys(const ModelKeys& keys);

/// Which parts of a parameter a process holds.
using SlicesOf = std::function<std::vector<Slice>(const Param&)>;
/// Returns the values of a component's parameters in the table, by input name ("unet/conv_in.weight").
using WeightsOf = std::function<HostArrays(const ParamTable&, const std::string& component)>;

class ModelWeights {
 public:
  /// Initial weights of training. A component whose key is set (train_new_unet, …) is initialized at random from
  /// `seed`. For other components throws io if the config needs other tensors than the files have (match_weights.h).
  static ModelWeights for_training(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                   uint64_t seed);
  /// Weights for sampling. They are never random: opened components must have files.
  static ModelWeights for_sampling(const ModelFolder& folder, const Family& family, const ModelKeys& keys,
                                   uint64_t seed);

  /// Throws io naming the first of these components whose weights are missing.
  void check_present(const std::vector<std::string>& components) const;
  /// Throws invalid_config naming the first tensor in few bits that a component takes from its files. Reads headers
  /// only.
  void check_not_quantized(const ModelFolder& folder, const std::string& component) const;
  /// Folder or file of a component's weights; empty: they are random, or were set.
  std::string location(const std::string& component) const;
  /// The files of a component's weights, including an index, if diffusers can read a model folder with these files:
  /// file names and tensor names are diffusers'. Else empty.
  std::vector<std::string> linkable(const ParamTable& params, const std::string& component) const;
  /// Replaces a component's weights by trained values, by input name.
  void set(const std::string& component, HostArrays values) { replaced_[component] = std::move(values); }
  /// Rows that are added to a text encoder's embeddings of tokens, f32 [n, width] (nn::embedding).
  void set_added_rows(const std::string& component, HostArray rows) { added_rows_[component] = std::move(rows); }
  /// The same: each is the row `id` of these embeddings.
  void set_added_rows_like(const std::string& component, int32_t id) { added_rows_like_[component] = id; }
  /// Random values are generated for these slices only.
  void set_slices(SlicesOf slices) { slices_ = std::move(slices); }
  /// Matches names and shapes now: throws io if there are no weights, or naming every missing or misshapen tensor;
  /// unused ones were found when the model was opened, so the table may have a part of the component. The returned
  /// function reads or initializes the values; the table must live until then. Values have the table's storage types;
  /// keep_types: values from files keep the files' types.
  std::function<NamedShards()> open(const ParamTable& params, const std::string& component,
                                    bool keep_types = false) const;
  HostArrays read(const ParamTable& params, const std::string& component) const {
    return as_arrays(open(params, component)());
  }

 private:
  ModelWeights(const ModelFolder& folder, uint64_t seed);
  void replace_autoencoder(const Family& family, const ModelKeys& keys);
  void replace_text_encoders(const ModelFolder& folder, const ModelKeys& keys);
  void check_sizes(const ModelFolder& folder, const Family& family) const;

  std::map<std::string, std::string> locations_;  // components without one are random
  std::map<std::string, WeightNameMap> other_names_;
  std::map<std::string, HostArrays> replaced_;
  std::map<std::string, HostArray> added_rows_;
  std::map<std::string, int32_t> added_rows_like_;
  std::shared_ptr<OpenedWeights> opened_;
  SlicesOf slices_ = [](const Param& p) { return std::vector<Slice>{Slice::all(p.shape.dims)}; };
  uint64_t seed_;
};

/// Throws invalid_config if `location` of a component's weights is empty: the folder's single file has no such model.
/// The message names the key that gives it.
void check_in_single_file(const ModelFolder& folder, const Family& family, const std::string& component,
                          const std::string& location);
/// Throws invalid_config if the folder's model is not the one that model_name, flux_name and model_type name.
void check_kind(const ModelKeys& keys, const ModelFolder& folder, const Family& family);
/// Path of the weights that a key such as vae_file names: a file, the component's folder of a model folder, or that
/// folder itself.
std::string component_files(const std::string& name, const std::string& component);
/// Selects this component's parameters from values of several components; result in their storage types.
HostArrays component_weights(const ParamTable& params, const std::string& component, const HostArrays& all);
/// Matches the tensors of `file`, opened at `path`, with the component's parameters immediately; the returned function
/// reads them. Throws as open_weights with these options.
std::function<HostArrays()> open_component(const ParamTable& params, const std::string& component,
                                           const SafetensorsReader& file, const std::string& path,
                                           const LoadOptions& options = {});
/// The same, but each array is read separately, by published name and in the file's type (open_each_weight).
ArraysToWrite open_each_stored(const ParamTable& params, const std::string& component, const SafetensorsReader& file,
                               const std::string& path, const WeightNameMap& weight_names = {});
/// Parameters under their published names: a stacked parameter becomes one array per layer.
NamedShards published(const ParamTable& params, const std::string& component, const NamedShards& values);

}  // namespace md
