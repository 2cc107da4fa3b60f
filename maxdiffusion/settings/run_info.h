// A run's name, file locations and seeds, and the files that this process writes: decided once, before any file is
// opened.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/metrics/profile.h"
#include "maxdiffusion/metrics/recorder.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/settings/run_config.h"

namespace md {

struct RunInfo {
  std::string name;
  std::string folder;                  // output_dir/run_name, or its local copy if that is in a bucket; empty: no name
  std::string place;                   // final location of the folder's files: `folder`, or in a bucket
  std::string checkpoint_dir;          // may be in a bucket; empty: no name
  uint64_t seed = 0, sample_seed = 0;  // the same in all processes
  bool is_coordinator = true;          // process 0, the only one that writes the run's files and samples
  bool has_all_weights = true;         // false if GPUs or TPUs of several processes form one mesh
  // Files that this process writes; they are local.
  MetricsConfig metrics;
  ProfileConfig profile;
  std::string timing_file;                                   // empty: none
  std::vector<std::pair<std::string, std::string>> uploads;  // files outside the folder → their remote locations
  std::string config_copy;                                   // a second copy of config.yml; empty: none
  /// The text of config.yml: the keys as set, with actual seeds instead of -1, without secrets.
  std::string config_yaml;
};
/// Called by all processes. Writes nothing. A seed of -1 becomes that of the run's config.yml, or a random one, which
/// is logged. Throws invalid_config for save_config_to_gcs without base_output_directory, and if the processes' keys
/// differ (check_same_keys).
RunInfo make_run_info(const RunConfig& config, Processes& all);
/// Throws invalid_config unless the keys name a run's folder.
void check_has_folder(const RunInfo& run);

}  // namespace md
