#include "maxdiffusion/settings/data_mode.h"

namespace md {

const char* name_of(DataMode mode) {
  constexpr const char* kNames[] = {"images, encoded in each step",
                                    "images, encoded once",
                                    "encoded records",
                                    "synthetic latents",
                                    "DreamBooth",
                                    "recorded batches"};
  return kNames[static_cast<size_t>(mode)];
}

DataMode data_mode(const DataKeys& k, bool videos) {
  const bool encoded = k.denoise.cache_latents_text_encoder_outputs;
  if (!k.denoise.replay_batches.empty()) return DataMode::replay;
  if (!k.dreambooth.instance_data_dir.empty()) return DataMode::dreambooth;
  if (reads_encoded_records(k)) return DataMode::encoded_records;
  // Samples are encoded ones if a key sets their sizes, or if the model generates videos.
  if (k.source.dataset_type == "synthetic" && encoded) {
    bool sized = false;
    SyntheticKeys keys = k.synthetic;
    keys.visit([&](const char*, const std::optional<int64_t>& value, auto&&...) { sized |= value.has_value(); });
    if (sized || videos) return DataMode::synthetic_latents;
  }
  return encoded ? DataMode::cached_latents : DataMode::images;
}

bool reads_encoded_records(const DataKeys& k) {
  return k.denoise.cache_latents_text_encoder_outputs && k.source.load_tfrecord_cached &&
         (k.source.dataset_type == "tfrecord" || k.source.dataset_type == "grain");
}

}  // namespace md
