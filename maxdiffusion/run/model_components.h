// A run's devices and models. All stages of training, sampling and data preparation get programs and weights from here.
// Frozen models (which encode data, decode samples and complete checkpoints) are loaded when first needed.
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
  /// Devices of the frozen models: those of this process, which it uses independently of other processes.
  const Devices& local_devices() const { return local_devices_; }
  DeviceCounts device_counts() const { return {devices_.count(), devices_.replicas()}; }
  /// As ModelWeights::check_not_quantized.
  void check_not_quantized(const std::string& component) const {
    model_.weights.check_not_quantized(folder(), component);
  }
  /// As ModelWeights::open. For the autoencoder, the table may hold only some parameters, such as the encoder's.
  std::function<NamedShards()> open_weights(const ParamTable& params, const std::string& component);
  /// Random initial values, also if there are files.
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

  /// Largest number of samples per call of the encoders' programs; text_batch: captions.
  int64_t encoder_batch() const;
  int64_t text_batch() const;
  /// Bytes per device that the autoencoder's programs may use in addition to their weights: 1.5 GB, or a quarter of the
  /// training state's size if that is more. Unlimited if encoder_batch_size is set.
  int64_t encoder_bytes() const;
  /// encoder_bytes() for a step that stores `state_bytes` per device between steps.
  static int64_t encoder_bytes(int64_t state_bytes);
  /// The text encoders with the weights from before this run trained them.
  TextEncoder& text_encoder();
  MediaAutoencoder& media_autoencoder();
  /// Frees the text encoders' memory on host and devices; text_encoder() loads them again. They are kept if no file has
  /// their weights.
  void free_text_encoder();
  /// Likewise for the autoencoder.
  void free_autoencoder();
  /// The autoencoder's values by input name.
  const HostArrays& autoencoder_values();

  /// Replaces the autoencoder's weights by trained values, by input name.
  void set_autoencoder(HostArrays values);
  /// Sets the scale of its latents from measured moments; see Autoencoder::with_measured_latent_scale.
  void fit_autoencoder(const EachMoments& moments);
  /// The text of scheduler_config.json for checkpoints; see training_config.
  std::string trained_scheduler_config() const;
  void note_damaged_weights(Error& e) const { md::note_damaged_weights(model_, e); }
  /// Adds the files that make a checkpoint a complete model folder. Weights from files that diffusers can read are
  /// linked, not written.
  void complete(CheckpointContent& content);

 private:
  EncoderOptions options_;
  SchedulerKeys scheduler_;
  OpenedModel model_;
  Devices devices_, local_devices_;
  HostArrays autoencoder_values_;
  std::unique_ptr<TextEncoder> text_encoder_;
  std::unique_ptr<MediaAutoencoder> media_autoencoder_;
};

/// Calls `act` and returns its result; device errors get ModelComponents::note_damaged_weights.
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
