// A run's devices and models, opened: every stage of training, sampling and writing data takes its programs and weights
// from here. The models around the trained one (which encode its data, decode its samples and complete its checkpoints)
// are loaded when first needed.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/encoders/media_autoencoder.h"
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/settings/requests.h"

namespace md {

/// Not thread safe.
class ModelComponents {
 public:
  explicit ModelComponents(const ComponentsRequest& request)
      : ModelComponents(request.model, request.devices, request.encoders) {}
  ModelComponents(const ModelRequest& model, const DeviceRequest& devices, const EncoderOptions& encoders);
  ModelComponents(const ModelComponents&) = delete;

  OpenedModels opened() const {
    return {folder(), *family(), devices_, sample_size(options_.sizes, options_.resolution, *family())};
  }
  const EncoderOptions& options() const { return options_; }
  const ModelFolder& folder() const { return model_.folder; }
  const std::shared_ptr<const Family>& family() const { return model_.family; }
  const Devices& devices() const { return devices_; }
  /// What models around the trained one run on: this process's, which it may use alone.
  const Devices& own_devices() const { return own_devices_; }
  DeviceCounts device_counts() const { return {devices_.count(), devices_.replicas()}; }
  /// As ModelWeights::open. Of the autoencoder, the table may hold only some parameters, such as the encoder's.
  std::function<NamedShards()> open_weights(const ParamTable& params, const std::string& component);
  /// Random values, whatever else there is.
  std::function<NamedShards()> open_random(const ParamTable& params, const std::string& component) const {
    return model_.weights.open(params, component);
  }
  WeightsOf weights_of() {
    return [this](const ParamTable& params, const std::string& component) {
      return as_arrays(open_weights(params, component)());
    };
  }

  /// See md::denoiser_options.
  ScopeOptions denoiser_options() const;

  /// Samples that the programs below take at a time, at most; text_batch: captions.
  int64_t encoder_batch() const;
  int64_t text_batch() const;
  /// Memory of one device that the autoencoder's programs may take besides their weights: 1.5 GB, or a quarter of what
  /// a training step holds there between steps, if that is more. Without bound where encoder_batch_size is given.
  int64_t encoder_bytes() const;
  /// With the text encoders' weights as they were before this run trained them.
  TextEncoder& text_encoder();
  MediaAutoencoder& media_autoencoder();
  /// Gives back the memory of the text encoders, on the devices and here; text_encoder() reads them again. They stay
  /// where their weights are in no file.
  void free_text_encoder();
  /// Likewise of the autoencoder.
  void free_autoencoder();
  /// The autoencoder's values by input name.
  const HostArrays& autoencoder_values();

  /// Replaces the autoencoder's weights by values, by input name, that this run has trained.
  void set_autoencoder(HostArrays values);
  /// Sets the scale of its latents; see Autoencoder::with_measured_latent_scale.
  void fit_autoencoder(const EachMoments& moments);
  /// The text of scheduler_config.json for checkpoints; see training_config.
  std::string trained_scheduler_config() const;
  void note_damaged_weights(Error& e) const { md::note_damaged_weights(model_, e); }
  /// Adds what the content of a checkpoint lacks to be a whole model folder. Weights that came from files which
  /// diffusers reads are linked, not written.
  void complete(CheckpointContent& content);

 private:
  EncoderOptions options_;
  SchedulerKeys scheduler_;
  OpenedModel model_;
  Devices devices_, own_devices_;
  HostArrays autoencoder_values_;
  std::unique_ptr<TextEncoder> text_encoder_;
  std::unique_ptr<MediaAutoencoder> media_autoencoder_;
};

/// What `act` returns; an error of the devices gets ModelComponents::note_damaged_weights.
template <class F>
auto naming_damaged_weights(const ModelComponents& models, F act) {
  try {
    return act();
  } catch (Error& e) {
    if (e.code() == Code::device) models.note_damaged_weights(e);
    throw;
  }
}

}  // namespace md
