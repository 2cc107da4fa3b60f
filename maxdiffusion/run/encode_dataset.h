// What the models around the trained one make of images and captions, and its cache on disk. Neither making nor reading
// it holds the data set: a part is decoded while the one before it is encoded, and samples are read through memory
// maps.
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
  int64_t together = 512;   // images of a part
};
/// What `encode` makes of the images of each bucket, kept on disk; what is there is not made again. Images that cannot
/// be used are named, skipped and counted. Throws io where none is left.
struct CachedImages {
  std::vector<ImageSize> sizes;  // of the buckets that hold images
  std::vector<std::shared_ptr<const ArrayCache>> buckets;
  int64_t skipped = 0;

  int64_t size() const;
};
CachedImages cache_images(const ImagesInBuckets& images, const ImageConfig& config, const CacheConfig& cache,
                          const EncodeImages& encode);
/// The samples of one bucket. With random_flip the random bits of each read decide whether it is mirrored, as
/// image_batches does.
std::shared_ptr<const Examples> cached_examples(std::shared_ptr<const ArrayCache> cache, const ImageConfig& config);

/// What of captions is kept: what the text encoders make of them, or, where these are trained, token ids.
enum class CachedText { embeddings, tokens };
/// moments (unscaled) and `text` of every image, its mask and sizes as configured, and conditioning from first
/// and last frames (Family::image_fields). `cache_dir`: may be in a bucket. `caption`: in place of each image's own,
/// unless null.
CachedImages encode_dataset(ModelComponents& models, const std::string& cache_dir,
                            const std::shared_ptr<const RecordSource>& source, const ImageConfig& config,
                            CachedText text = CachedText::embeddings, const std::string* caption = nullptr);
/// The prepared pixels alone, to train an autoencoder on.
CachedImages cache_pixels(const std::string& cache_dir, const std::shared_ptr<const RecordSource>& source,
                          const ImageConfig& config);

}  // namespace md
