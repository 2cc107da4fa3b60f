// What MaxDiffusion calls the models of a folder, and what it does with them that no key says: one row for each kind of
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
  std::string file_prefix = "image_";  // names of files that generate writes begin with this; {} is the seed
  bool always_clips_by_norm = false;   // to max_grad_norm, also where opt_enable_grad_global_norm_clipping is off
  std::optional<int64_t> norm_num_groups = {};  // in config.json, which the key of that name repeats
  /// TFLOP of a training step on one sample with latents of these sizes, for comparisons; empty: as counted here.
  std::function<double(const Dims& latent)> tflops = {};

  std::string prefix_of_files(uint64_t seed) const;
};
/// Warns where a run's key repeats a member of config.json with another value.
void check_repeated_keys(const ReferenceConventions& reference, int64_t norm_num_groups);

/// By the folder's pipeline class; one that MaxDiffusion does not know has none.
ReferenceConventions reference_conventions(const ModelFolder& folder);
/// What marks a file of an unsupported family: a key, and how its value begins.
struct MissingFamily {
  const char *name, *key, *value = "";
};
const std::vector<MissingFamily>& missing_families();
/// Those that are here, as messages name them.
inline constexpr const char* kFamiliesHere =
    "Stable Diffusion 1 and 2, SDXL, FLUX.1, FLUX.2-klein, Wan 2.1 and 2.2, Z-Image, Qwen-Image";
/// Keys that only files of one family have, given as above, and that have no effect here.
struct FamilyKeys {
  const char *name, *key, *value;
  std::vector<std::string> unread;
};
const std::vector<FamilyKeys>& keys_of_families();

/// Names behind train_ and generate_ that its users type: "sdxl", …
std::vector<std::string> reference_commands();
/// Names of its programs that are prepare_tfrecords here.
std::vector<std::string> reference_converters();

}  // namespace md
