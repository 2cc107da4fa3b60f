// What the models around the trained one make of pictures and captions, and its cache on disk.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/tasks/latent_diffusion.h"
#include "maxdiffusion/train/companions.h"

namespace md {

/// What the cached arrays depend on beside the pictures and captions: the weights and configs that make them.
std::string cache_key(const RunConfig& c, const ModelFolder& folder, Companions& companions);
/// moments (unscaled), prompt_embeds and, for SDXL, text_embeds of every picture; with random_flip every picture is
/// there twice, once mirrored. Only what the cache does not hold is computed.
HostArrays encoded(const RunConfig& c, Companions& companions, const LoadedImages& pictures, bool flip,
                   const std::string& key);
/// Latents become (z − shift)·scale: the means move and stretch, the deviations stretch.
HostArray scaled(const HostArray& moments, const VaeConfig& vae);
/// Of every picture the fields that `task` takes from a cache: scaled moments, and embeddings or, where the text
/// encoder is trained, ids. `key`: what else they depend on.
HostArrays cached_fields(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                         const LatentDiffusion& task, const LoadedImages& pictures, const std::string& key = "");
/// Pictures [from, to) of the set in which every picture comes once as it is and then once mirrored.
HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to);
/// Of moments [..., 2C] the first half of the last axis.
HostArray means(const HostArray& moments);
/// Token ids s32 [N, L] of captions; a warning counts those that are cut.
HostArray token_ids(const ClipTokenizer& tokenizer, const std::vector<std::string>& captions, int64_t length);

}  // namespace md
