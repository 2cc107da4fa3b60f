// What the models around the trained one make of images and captions, and its cache on disk.
#pragma once

#include <string>

#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/run/run_models.h"

namespace md {

/// What the cached arrays depend on beside the images and captions: the weights, configs and tokenizers that make them.
std::string cache_key(RunModels& models);
/// moments (unscaled) and the conditioning fields of every image; with random_flip every image is there twice, once
/// mirrored. Only what the cache does not hold is computed. `key`: see cache_key.
HostArrays encode_dataset(RunModels& models, const LoadedImages& images, bool flip, const std::string& key);
/// Images or videos [from, to) of twice as many: first all of `pixels`, then all of them mirrored.
HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to);

}  // namespace md
