// Images as conditioning. Those that videos begin and end with: embeddings of an image encoder, and latents of the
// known frames from the autoencoder. Reference images: latents of each.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "maxdiffusion/encoders/media_autoencoder.h"

namespace md {

/// Throws invalid_config where a family's media take more or fewer images than are given.
void check_images(const Family& family, int64_t given);

/// Refers to `devices` and `autoencoder`. Not thread safe.
class ImageConditioner {
 public:
  /// For `batch` samples at a time.
  ImageConditioner(const Devices& devices, std::shared_ptr<const Family> family, WeightsOf weights,
                   MediaAutoencoder& autoencoder, const ScopeOptions& scope, const CompileConfig& compile,
                   int64_t batch = 1);
  /// Of each sample the images, u8 [H, W, 3] of any size, the first and perhaps the last, or the reference images; all
  /// samples have as many, and reference images of the same sizes → ImageConditioning::fields or
  /// Family::reference_fields, one row for each sample. Throws invalid_config where the family takes more or fewer.
  HostArrays encode(const std::vector<std::vector<HostArray>>& samples, const MediaSize& size);

 private:
  HostArrays encode_references(const std::vector<std::vector<HostArray>>& samples);
  /// Embeddings of prepared images.
  HostArrays image_embeddings(const HostArray& prepared);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  WeightsOf weights_;
  MediaAutoencoder& autoencoder_;
  ScopeOptions scope_;
  CompileConfig compile_;
  int64_t batch_;
  std::optional<Program> program_;  // of the image encoder
  ArrayMap encoder_weights_;        // its weights
};

}  // namespace md
