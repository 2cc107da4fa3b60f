// ModelFolder: a local folder in diffusers' layout, opened: configs parsed, tokenizers loaded, weights found (not
// read).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/data/text/tokenizer.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/nn/param.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

/// Config::from_json of a file. Throws io where it cannot be read, invalid_config naming it where it is not understood.
template <class Config>
Config read_config(const std::string& path);

class ModelFolder {
 public:
  /// `name`, `revision`: as local_folder takes them. Throws io when the folder or a config.json is missing,
  /// invalid_config when one does not describe a known model.
  /// `bpe_file`: merges list for folders without tokenizer files; empty: the installed one.
  static ModelFolder open(const std::string& name, const std::string& bpe_file, const std::string& revision = "");

  std::string path;
  UNetConfig unet;
  VaeConfig vae;
  ClipTextConfig text_encoder;
  std::optional<ClipTextConfig> text_encoder_2;
  std::shared_ptr<ClipTokenizer> tokenizer, tokenizer_2;
  /// Texts of model_index.json and of every config.json, by path relative to the folder.
  std::map<std::string, std::string> files;

  /// Adds the tokenizers' files, as transformers reads them, to a checkpoint's.
  void add_tokenizers(std::map<std::string, std::string>& files) const;
  const std::string& scheduler_config() const { return files.at("scheduler/scheduler_config.json"); }
  /// Values for the parameters of `component` in the table, in storage dtype, by input name ("unet/conv_in.weight").
  /// With `fresh` they are drawn from the seed; otherwise read: throws io when there are none, or naming every
  /// missing, unused or misshapen tensor.
  HostArrays values(const ParamTable& params, const std::string& component, bool fresh, uint64_t seed) const;
  /// The same from a file or folder of weights that is not the component's own.
  static HostArrays values_at(const ParamTable& params, const std::string& component, const std::string& weights);
  /// The same in two: throws now, draws or reads when the result is called. The table must live until then.
  std::function<HostArrays()> open_values(const ParamTable& params, const std::string& component, bool fresh,
                                          uint64_t seed) const;
};

/// What answers the parameters of a component with values, by input name: a folder, or a folder with LoRAs merged.
using WeightsOf = std::function<HostArrays(const ParamTable&, const std::string& component)>;

/// What `unet_checkpoint` names: unet/ of a model folder, or the folder itself.
std::string unet_folder(const std::string& name);

/// Parameters under their published names: a stacked parameter becomes one array per layer.
HostArrays published(const ParamTable& params, const std::string& component, const HostArrays& values);

/// Places host values on the devices with the sharding of the program's inputs. Inputs without a value are skipped.
void place(const Devices& devices, const Program& program, const HostArrays& values, ArrayMap& out);

}  // namespace md
