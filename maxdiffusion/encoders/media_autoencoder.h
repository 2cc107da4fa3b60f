// Media to latent moments and latents to media on the devices: a family's autoencoder, compiled with its weights. A
// video goes through two programs, one for its first frame and one for each chunk after it, so that the memory of the
// devices does not grow with its length.
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

/// Latent frames of a video that are made or decoded at a time, after the first; below 1: all of them at once.
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

/// Each direction is compiled on first use, for each size of media, for `batch` samples at a time, a multiple of the
/// devices; for fewer where a program of one sample on each device says that they would take more than `bytes` of
/// memory there in addition to the weights. What is left over at the end goes through that one. Refers to `devices`.
/// Not thread safe.
class MediaAutoencoder {
 public:
  /// `weights`: of the autoencoder, by input name; placed on the devices once. `scope`, `keys`: see
  /// autoencoder_options.
  MediaAutoencoder(const Devices& devices, std::shared_ptr<const Autoencoder> autoencoder, HostArrays weights,
                   int64_t batch, const ScopeOptions& scope, const CompileConfig& compile, const EncoderKeys& keys = {},
                   MediaChunks chunks = {}, int64_t bytes = std::numeric_limits<int64_t>::max());
  /// Samples at a time from now on.
  void set_batch(int64_t batch) { batch_ = batch; }
  /// u8 [N, H, W, 3], or f32 in [−1, 1] → f32 [N, h, w, 2C]: mean and standard deviation of the posterior, unscaled.
  /// Videos: [N, F, H, W, 3] → [N, F', h, w, 2C]. Throws invalid_config where F is not 1 + n·Autoencoder::frame_scale.
  /// `encoded`: called with the number of samples that are done; may be empty.
  HostArray encode(const HostArray& pixels, const std::function<void(int64_t)>& encoded = {});
  /// f32 [N, h, w, C], unscaled → f32 [N, H, W, 3], in [−1, 1] up to error; videos: [N, F', h, w, C] →
  /// [N, F, H, W, 3]. `tiled`: images' latents larger than Autoencoder::decoder_tile are decoded in tiles (tiles.h).
  HostArray decode(const HostArray& latents, bool tiled = false);
  /// Autoencoder::published_latents of f32 [N, h, w, C], unscaled.
  HostArray published(const HostArray& latents);

 private:
  /// Programs by the sizes of their input, as buckets have several.
  using Stage = std::map<std::pair<DType, Dims>, Program>;
  struct Direction {
    std::string name;
    std::function<Tensor(const Models&, Tensor, MediaState*)> build;
    int64_t scale;             // sides of the media, as multiples of those of the input
    Stage whole, first, next;  // media at once; the first and the other chunks of a video
    std::function<void(int64_t)> done = {};
  };
  HostArray run(Direction& direction, const HostArray& input);
  /// `chunk` latent frames at a time, each of which is `in` frames of the input and `out` of the result.
  HostArray run_chunks(Direction& direction, const HostArray& input, int64_t chunk, int64_t in, int64_t out);
  /// `state`: what the chunk before left, by name; gets what this one leaves. Null: the media are whole.
  HostArray run(const Direction& direction, Stage& stage, const HostArray& input, ArrayMap* state);
  const Program& program(const Direction& direction, Stage& stage, const HostArray& input, const ArrayMap* state);
  /// Samples to take next of `left`, of media like `input`'s, whole or, of videos, `frames` of the result at a time.
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
