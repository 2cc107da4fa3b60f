// Encoded images and captions of a dataset (latents, embeddings), and their cache on disk. The dataset is never in
// memory as a whole: one part is decoded while the previous one is encoded, and samples are read through memory maps.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/checkpoint/array_cache.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/run/cache_use.h"
#include "maxdiffusion/run/model_components.h"

namespace md {

/// Called with the number of images that are done.
using Encoded = std::function<void(int64_t)>;
/// Fields computed from images that were decoded together, axis 0 for the images. "mirrored.x" is x of the mirrored
/// image.
using EncodeImages = std::function<HostArrays(const LoadedImages&, const Encoded&)>;
/// Which images of each bucket a run reads, of the buckets' record numbers.
using ImagesRead = std::function<std::vector<std::vector<bool>>(const std::vector<std::vector<int64_t>>&)>;

struct CacheConfig {
  CachePlace place;
  std::string key;              // see ArrayCache
  std::string title;            // of the progress bar
  int64_t together = 512;       // images per part
  std::string kind = "images";  // see ArrayCache
  bool with_captions = false;   // what is computed of an image depends on its caption
  ImagesRead read = nullptr;    // null: all
};
/// What is computed only from captions: each caption is encoded once.
struct CachedCaptions {
  std::string key;  // see ArrayCache
  std::function<HostArrays(const std::vector<std::string>&)> encode;
  const std::string* caption = nullptr;  // replaces every image's, unless null
  int64_t together = 128;                // captions per part
};

/// The cached samples of one bucket: the arrays of each image, and those of its caption. Thread safe for reading.
/// Reading one that the run does not read (CacheConfig::read) throws internal, as prefetching beyond the last step
/// does.
class CachedSamples {
 public:
  CachedSamples(std::shared_ptr<const ArrayCache> images, std::shared_ptr<const ArrayCache> captions)
      : images_(std::move(images)), captions_(std::move(captions)) {}
  void add(int64_t record, ArrayCache::Place image, ArrayCache::Place caption) {
    samples_.push_back({record, true, image, caption});
  }
  /// Adds one that the run does not read.
  void add_unread(int64_t record) { samples_.push_back({record, false, {}, {}}); }
  int64_t size() const { return std::ssize(samples_); }
  /// The number of a sample's record.
  int64_t record(int64_t sample) const { return samples_.at(static_cast<size_t>(sample)).record; }
  /// The arrays of a sample, without axis 0. Borrowed from memory maps.
  HostArrays read(int64_t sample) const;
  /// Calls `take` with the array `name` of each image, with an axis 0 of 1.
  void each(const std::string& name, const std::function<void(const HostArray&)>& take) const;

 private:
  struct Sample {
    int64_t record;
    bool cached;
    ArrayCache::Place image, caption;
  };
  std::shared_ptr<const ArrayCache> images_, captions_;  // captions_: null: none are cached
  std::vector<Sample> samples_;
};

/// Results of `encode` for the images of each bucket, and of `captions`, cached on disk by what they are computed from:
/// an image with its mask and options, a caption. What is cached is not computed again, wherever it comes from. Images
/// that cannot be used are skipped and counted, with a warning. With CacheConfig::read the bucket's next image replaces
/// a skipped one, so that the order of samples does not depend on which images were tried. `images` has keys. Throws io
/// if no image remains.
struct CachedImages {
  std::vector<ImageSize> sizes;  // of the buckets that have images
  std::vector<std::shared_ptr<const CachedSamples>> buckets;
  int64_t images = 0, skipped = 0;  // images: those that can be used or were not tried
};
CachedImages cache_images(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                          const EncodeImages& encode, const CachedCaptions* captions = nullptr);
/// The samples of one bucket. With random_flip a sample is mirrored according to its random bits, as in image_batches.
std::shared_ptr<const Examples> cached_examples(std::shared_ptr<const CachedSamples> samples,
                                                const ImageConfig& config);

/// The reference images of each of `images` images. `places`: LoadedImages::references.
std::vector<std::vector<HostArray>> references_of(const std::vector<HostArray>& places, int64_t images);

/// What is cached of captions: embeddings, or token ids if text encoders are trained.
enum class CachedText { embeddings, tokens, none };
/// Caches moments (unscaled) and `text` of every image, its mask and sizes if configured, and conditioning from first
/// and last frames (ImageConditioning::fields). `caption`: replaces every image's caption, unless null. `read`: see
/// CacheConfig.
CachedImages encode_dataset(ModelComponents& models, const CachePlace& cache,
                            const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                            CachedText text = CachedText::embeddings, const std::string* caption = nullptr,
                            ImagesRead read = nullptr);
/// Number of images of `source` that encode_dataset caches if a run reads all of them and all decode.
int64_t images_to_encode(const CachePlace& cache, const std::shared_ptr<const RecordSource>& source,
                         const ImageConfig& config);
/// Caches prepared pixels only, for training an autoencoder.
CachedImages cache_pixels(const CachePlace& cache, const std::shared_ptr<const RecordSource>& source,
                          const ImageConfig& config);

}  // namespace md
