// MaxDiffusion's names for the models of a folder, and its behaviour that no key sets: one row for each kind of
// pipeline, in reference_conventions.cc.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

struct ReferenceConventions {
  std::vector<std::string> names = {}, types = {};  // values of the keys model_name (flux_name) and model_type
  std::string file_prefix = "image_";               // prefix of the names of generated files; {} is the seed
  bool always_clips_by_norm = false;  // clips to max_grad_norm even if opt_enable_grad_global_norm_clipping is off
  std::optional<int64_t> norm_num_groups = {};  // value in config.json, which the key of that name repeats
  /// TFLOP of a training step on one sample with latents of these sizes, for comparisons; empty: as counted by this
  /// program.
  std::function<double(const Dims& latent)> tflops = {};

  std::string prefix_of_files(uint64_t seed) const;
};
/// Warns if a run's key contradicts the member of config.json that it repeats.
void check_repeated_keys(const ReferenceConventions& reference, int64_t norm_num_groups);

/// Looked up by the folder's pipeline class; default values for classes that MaxDiffusion does not support.
ReferenceConventions reference_conventions(const ModelFolder& folder);
/// A key, and a prefix of its value, that identify configs of an unsupported family.
struct MissingFamily {
  const char *name, *key, *value = "";
};
const std::vector<MissingFamily>& missing_families();
/// Supported families, for messages.
inline constexpr const char* kFamiliesHere =
    "Stable Diffusion 1 and 2, SDXL, FLUX.1, FLUX.2-klein, Wan 2.1 and 2.2, Z-Image, Qwen-Image";
/// Keys of one family's configs, identified as above, that have no effect in this program.
struct FamilyKeys {
  const char *name, *key, *value;
  std::vector<std::string> unread;
};
const std::vector<FamilyKeys>& keys_of_families();

/// Suffixes of train_ and generate_ in MaxDiffusion's program names: "sdxl", …
std::vector<std::string> reference_commands();
/// Names of MaxDiffusion's programs that prepare_tfrecords replaces.
std::vector<std::string> reference_converters();

}  // namespace md
