// Images as conditioning. First and last images of videos: embeddings of an image encoder, and latents of the known
// frames from the autoencoder. Reference images: latents of each.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "maxdiffusion/encoders/media_autoencoder.h"

namespace md {

/// Throws invalid_config if the family's media need another number of images than `count`.
void check_images(const Family& family, int64_t count);

/// Encodes images as conditioning. Refers to `devices` and `autoencoder`. Not thread safe.
class ImageConditioner {
 public:
  /// `batch`: samples encoded at a time.
  ImageConditioner(const Devices& devices, std::shared_ptr<const Family> family, WeightsOf weights,
                   MediaAutoencoder& autoencoder, const ScopeOptions& scope, const CompileConfig& compile,
                   int64_t batch = 1);
  /// `samples`: the images of each sample, u8 [H, W, 3] of any size: the first and optionally the last image, or the
  /// reference images. All samples have the same number of images, and reference images of the same sizes. Returns
  /// ImageConditioning::fields or Family::reference_fields, one row for each sample. Throws invalid_config if the
  /// family needs another number.
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
