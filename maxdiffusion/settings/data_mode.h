// The source of a training run's batches, decided from the keys in one place.
#pragma once

#include "maxdiffusion/settings/run_config.h"

namespace md {

enum class DataMode {
  images,             // images and captions, encoded in each step
  cached_latents,     // images and captions, encoded once
  encoded_records,    // latents and embeddings that another program computed
  synthetic_latents,  // random latents and embeddings
  dreambooth,         // images of a subject and of its class
  replay,             // recorded batches
};
const char* name_of(DataMode mode);
/// `videos`: whether the model generates videos.
DataMode data_mode(const DataKeys& keys, bool videos);
/// Whether the keys say that records, if the run reads any, are latents and embeddings.
bool reads_encoded_records(const DataKeys& keys);

}  // namespace md
