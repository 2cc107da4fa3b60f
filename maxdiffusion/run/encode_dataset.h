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
#include "maxdiffusion/run/model_components.h"

namespace md {

/// Called with the number of images that are done.
using Encoded = std::function<void(int64_t)>;
/// Fields computed from images that were decoded together, axis 0 for the images. "mirrored.x" is x of the mirrored
/// image.
using EncodeImages = std::function<HostArrays(const LoadedImages&, const Encoded&)>;

struct CacheConfig {
  std::string folder, key;  // see ArrayCache
  std::string title;        // of the progress bar
  int64_t together = 512;   // images per part
};
/// Results of `encode` for the images of each bucket, cached on disk; cached results are not computed again. Images
/// that cannot be used are skipped and counted, with a warning. Throws io if no image remains.
struct CachedImages {
  std::vector<ImageSize> sizes;  // of the buckets that have images
  std::vector<std::shared_ptr<const ArrayCache>> buckets;
  int64_t skipped = 0;

  int64_t size() const;
};
CachedImages cache_images(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                          const EncodeImages& encode);
/// The samples of one bucket. With random_flip a sample is mirrored according to its random bits, as in image_batches.
std::shared_ptr<const Examples> cached_examples(std::shared_ptr<const ArrayCache> cache, const ImageConfig& config);

/// The reference images of each of `images` images. `places`: LoadedImages::references.
std::vector<std::vector<HostArray>> references_of(const std::vector<HostArray>& places, int64_t images);

/// What is cached of captions: embeddings, or token ids if text encoders are trained.
enum class CachedText { embeddings, tokens, none };
/// The number of each sample's record, s32 [], in a data set of several folders.
inline constexpr const char* kRecordField = "record";
/// Caches moments (unscaled) and `text` of every image, its mask and sizes if configured, and conditioning from first
/// and last frames (ImageConditioning::fields). `cache_dir`: may be in a bucket. `caption`: replaces every image's
/// caption, unless null.
CachedImages encode_dataset(ModelComponents& models, const std::string& cache_dir,
                            const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                            CachedText text = CachedText::embeddings, const std::string* caption = nullptr);
/// Caches prepared pixels only, for training an autoencoder.
CachedImages cache_pixels(const std::string& cache_dir, const std::shared_ptr<const RecordSource>& source,
                          const ImageConfig& config);

}  // namespace md
