// A family's autoencoder on the devices, compiled with its weights: media to latent moments, and latents to media. A
// video uses two programs, one for its first frame and one for each later chunk, so that device memory does not grow
// with its length.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "maxdiffusion/encoders/text_encoder.h"

namespace md {

/// u8 [0, 255] → f32 [−1, 1].
Tensor pixels_to_float(Tensor pixels);

/// Latent frames of a video that are encoded or decoded at a time, after the first; below 1: all at once.
struct MediaChunks {
  int64_t encode = 1, decode = 1;
};
/// Keys of the chunks of videos.
struct MediaChunkKeys {
  int64_t vae_encode_chunk = 4, vae_decode_chunk = 1;
  template <class V>
  void visit(V&& v) {
    v("vae_encode_chunk", vae_encode_chunk, "frames of a video that are encoded at a time, after the first; -1: all");
    v("vae_decode_chunk", vae_decode_chunk,
      "latent frames of a video that are decoded at a time, after the first; -1: all");
  }
  MediaChunks chunks(const Autoencoder& autoencoder) const;
};

/// Each direction is compiled on first use, for each size of media. A program takes `batch` samples at a time, a
/// multiple of the number of devices; fewer if they would need more than `bytes` of memory per device in addition to
/// the weights, as estimated from a program of one sample per device. That program also takes the remaining samples at
/// the end. Refers to `devices`. Not thread safe.
class MediaAutoencoder {
 public:
  /// `weights`: of the autoencoder, by input name; placed on the devices once. `scope`, `keys`: see
  /// autoencoder_options.
  MediaAutoencoder(const Devices& devices, std::shared_ptr<const Autoencoder> autoencoder, HostArrays weights,
                   int64_t batch, const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys = {},
                   MediaChunks chunks = {}, int64_t bytes = std::numeric_limits<int64_t>::max());
  /// Sets the number of samples at a time for later calls.
  void set_batch(int64_t batch) { batch_ = batch; }
  /// u8 [N, H, W, 3], or f32 in [−1, 1] → f32 [N, h, w, 2C]: mean and standard deviation of the posterior, unscaled.
  /// Videos: [N, F, H, W, 3] → [N, F', h, w, 2C]. Throws invalid_config unless F is 1 + n·Autoencoder::frame_scale.
  /// `encoded`: called with the number of finished samples; may be empty.
  HostArray encode(const HostArray& pixels, const std::function<void(int64_t)>& encoded = {});
  /// Pixels as in encode → scaled latents f32 [N, h, w, C]: the mode of the posterior.
  HostArray latents(const HostArray& pixels);
  /// f32 [N, h, w, C], unscaled → f32 [N, H, W, 3], in [−1, 1] up to error; videos: [N, F', h, w, C] →
  /// [N, F, H, W, 3]. `tiled`: images' latents larger than Autoencoder::decoder_tile are decoded in tiles (tiles.h).
  HostArray decode(const HostArray& latents, bool tiled = false);
  /// Autoencoder::published_latents of f32 [N, h, w, C], unscaled.
  HostArray published(const HostArray& latents);

 private:
  /// Programs by type and sizes of their input, as buckets have several.
  using Stage = std::map<std::pair<DType, Dims>, Program>;
  struct Direction {
    std::string name;
    std::function<Tensor(const Models&, Tensor, MediaState*)> build;
    int64_t scale;             // media side / input side
    Stage whole, first, next;  // whole media; first and later chunks of a video
    std::function<void(int64_t)> done = {};
  };
  HostArray run(Direction& direction, const HostArray& input);
  /// Runs `chunk` latent frames at a time. A latent frame is `in` frames of the input and `out` of the result.
  HostArray run_chunks(Direction& direction, const HostArray& input, int64_t chunk, int64_t in, int64_t out);
  /// `state`: arrays carried from the previous chunk, by name; replaced by this chunk's. Null: the media are whole.
  HostArray run(const Direction& direction, Stage& stage, const HostArray& input, ArrayMap* state);
  const Program& program(const Direction& direction, Stage& stage, const HostArray& input, const ArrayMap* state);
  /// Number of samples for the next call, at most `left`, with media like `input`'s: whole or, for videos, `frames`
  /// frames of the result at a time.
  int64_t samples_at_once(Direction& direction, const HostArray& input, int64_t left, int64_t frames);
  const Devices& devices_;
  std::shared_ptr<const Autoencoder> autoencoder_;
  HostArrays weights_;
  int64_t batch_, bytes_;
  ScopeOptions scope_;
  CompileConfig compile_;
  MediaChunks chunks_;
  ArrayMap placed_;  // weights
  Direction encoder_, decoder_, publisher_;
};

}  // namespace md
