// What a run is called, where its files are, its seeds, and what this process writes of it: decided once, before
// anything is opened.
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
  std::string folder;                  // output_dir/run_name, or its local copy, if that is in a bucket; empty: no name
  std::string place;                   // where the folder's files are in the end: the same, or in a bucket
  std::string checkpoint_dir;          // may be in a bucket; empty: no name
  uint64_t seed = 0, sample_seed = 0;  // the same in all processes
  bool is_coordinator = true;          // of process 0, the only one that writes the run's files and samples
  bool has_all_weights = true;         // not of several processes whose GPUs or TPUs are one mesh
  // What this process writes; files are on this machine.
  MetricsConfig metrics;
  ProfileConfig profile;
  std::string timing_file;                                   // empty: none
  std::vector<std::pair<std::string, std::string>> uploads;  // files outside the folder → their remote locations
  std::string config_copy;                                   // where config.yml goes as well; empty: nowhere
  /// The text of config.yml: the keys as they were given, with the seeds in place of -1, without secrets.
  std::string config_yaml;
};
/// Called by all processes. Writes nothing. A seed of -1 is that of the run's config.yml, or a random one, which is
/// logged. Throws invalid_config for save_config_to_gcs without base_output_directory.
RunInfo make_run_info(const RunConfig& config, Processes& all);
/// Throws invalid_config where keys name no folder of a run.
void check_has_folder(const RunInfo& run);

}  // namespace md
