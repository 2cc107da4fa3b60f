// A run's devices and models, opened: what every stage of training, sampling and writing data takes its programs and
// weights from. The models around the trained one are loaded when first needed: they encode its data, draw its samples,
// and make its checkpoints whole model folders.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "maxdiffusion/encoders/media_coder.h"
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/run/run_config.h"

namespace md {

/// What the weights are for; see ModelWeights.
enum class Purpose { training, sampling };

/// Refers to `config`. Not thread safe.
class RunModels {
 public:
  /// `model`: the folder. `controlnet`: a ControlNet's folder, or empty.
  RunModels(const RunConfig& config, const std::string& model, Purpose purpose, const std::string& controlnet = "");
  RunModels(const RunModels&) = delete;

  const RunConfig& config() const { return config_; }
  const ModelFolder& folder() const { return folder_; }
  const std::shared_ptr<const Family>& family() const { return family_; }
  const Devices& devices() const { return devices_; }
  /// As ModelWeights::open; of the autoencoder a table may hold a part, its encoder say.
  std::function<NamedPieces()> open_weights(const ParamTable& params, const std::string& component);
  /// Random values, whatever else there is.
  std::function<NamedPieces()> open_random(const ParamTable& params, const std::string& component) const {
    return weights_.open(params, component);
  }
  WeightsOf weights_of() {
    return [this](const ParamTable& params, const std::string& component) {
      return as_arrays(open_weights(params, component)());
    };
  }

  /// Samples that the programs below take at a time.
  int64_t encoder_batch() const { return 32 * devices_.mesh().devices(); }
  /// Weights of the text encoders before this run's training of them.
  TextEncoder& text_encoder();
  MediaCoder& media_coder();
  /// The autoencoder's values by input name.
  const HostArrays& autoencoder_values();

  /// An autoencoder that this run has trained, and the scale of its latents.
  void set_autoencoder(HostArrays values);
  void fit_autoencoder(const HostArray& moments);
  /// The model folder's scheduler_config.json with what was trained; see training_config.
  std::string trained_scheduler_config() const;
  /// Everything that the content of a checkpoint lacks to be a whole model folder. Weights that came from files are
  /// linked, not written.
  void complete(CheckpointContent& content);

 private:
  const RunConfig& config_;
  ModelFolder folder_;
  std::shared_ptr<const Family> family_;
  Devices devices_;
  ModelWeights weights_;
  HostArrays autoencoder_values_;
  std::unique_ptr<TextEncoder> text_encoder_;
  std::unique_ptr<MediaCoder> media_coder_;
};

}  // namespace md
