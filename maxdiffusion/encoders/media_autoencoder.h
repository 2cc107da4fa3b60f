// Media to latent moments and latents to media on the devices: a family's autoencoder, compiled with its weights.
#pragma once

#include <functional>
#include <memory>

#include "maxdiffusion/encoders/text_encoder.h"

namespace md {

/// u8 [0, 255] → f32 [−1, 1].
Tensor pixels_to_float(Tensor pixels);

/// Each direction is compiled on first use for `batch` samples at a time. Refers to `devices`. Not thread safe.
class MediaAutoencoder {
 public:
  /// `weights`: of the autoencoder, by input name; placed on the devices once for each direction. `scope`, `keys`: see
  /// autoencoder_options.
  MediaAutoencoder(const Devices& devices, std::shared_ptr<const Family> family, HostArrays weights, int64_t batch,
                   const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys = {});
  /// u8 [N, H, W, 3] → f32 [N, h, w, 2C]: mean and standard deviation of the posterior, unscaled.
  HostArray encode(const HostArray& pixels);
  /// f32 [N, h, w, C], unscaled → f32 [N, H, W, 3], in [−1, 1] up to error. `tiled`: latents larger than
  /// Family::decoder_tile are decoded in tiles (tiles.h).
  HostArray decode(const HostArray& latents, bool tiled = false);

 private:
  struct Direction {
    Shape input;
    std::unique_ptr<Program> program;
    ArrayMap weights;
  };
  using Build = std::function<Tensor(const Models&, Tensor)>;
  HostArray run(Direction& direction, const HostArray& input, const char* name, const Build& build);
  const Devices& devices_;
  std::shared_ptr<const Family> family_;
  HostArrays weights_;
  int64_t batch_;
  ScopeOptions scope_;
  CompileConfig compile_;
  Direction encoder_, decoder_;
};

}  // namespace md
