#include "maxdiffusion/run/reference_keys.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/families/missing_families.h"

namespace md {
namespace {

void refuse(bool set, const char* key, const char* reason) {
  check(!set, Code::invalid_config, "{} is set, but {}", key, reason);
}

void warn(bool set, const char* key, const char* reason) {
  if (set) log_warning("{} has no effect: {}", key, reason);
}

}  // namespace

void check_family_of_file(const ConfigSource& source) {
  for (const MissingFamily& family : missing_families()) {
    const auto it = source.values().find(family.key);
    if (it == source.values().end() || !it->second.text.starts_with(family.value)) continue;
    throw Error(Code::invalid_config,
                fmt::format("config: {}: {}{} is of a model of the family {}, which is not here", it->second.where,
                            family.key, *family.value ? "=" + it->second.text : "", family.name))
        .note(fmt::format("families that are here: {}", kFamiliesHere));
  }
}

void ReferenceKeys::validate() const {
  constexpr const char* kWeights = "weights are read from the model folder, where nothing has to be converted";
  refuse(scheduler_dtype != "float32", "scheduler_dtype", "samplers compute in float32; set it to that");
  constexpr const char* kService = "it belongs to a service of Google's cloud that this program does not speak to";
  refuse(enable_ml_diagnostics, "enable_ml_diagnostics", kService);
  refuse(enable_ondemand_xprof, "enable_ondemand_xprof", kService);
  warn(!profiler_gcs_path.empty(), "profiler_gcs_path", kService);
  warn(!profiler.empty(), "profiler", "nothing reads it in the reference either; enable_profiler is the switch");
  warn(enable_mllog, "enable_mllog", "nothing reads it in the reference either");
  warn(!dataset_config_name.empty(), "dataset_config_name", "nothing reads it in the reference either");
  warn(enable_tile_search, "enable_tile_search", "flash_block_sizes says how large blocks are");
  warn(ulysses_shards > 0, "ulysses_shards", "sequences are split over the axis context as logical_axis_rules say");
  warn(vae_spatial > 0, "vae_spatial", "the samples of a batch are split over the devices, not their width");
  warn(!converted_weights_dir.empty(), "converted_weights_dir", kWeights);
  warn(!pretrained_orbax_dir.empty(), "pretrained_orbax_dir", kWeights);
}

}  // namespace md
