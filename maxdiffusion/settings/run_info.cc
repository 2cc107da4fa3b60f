#include "maxdiffusion/settings/run_info.h"

#include <random>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/settings/changed_keys.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

Seed random_seed() {
  std::random_device device;
  return device() & 0x7fff'ffffU;  // in the range that other programs accept
}

Seed seed_of(const RunConfig& c, const RunInfo& run) {
  if (!c.run.seed.is_random()) return c.run.seed;
  const std::optional<RunConfig> before = config_of_run(run);
  const bool has_seed = before && !before->run.seed.is_random();
  const Seed seed = has_seed ? before->run.seed : random_seed();
  log_info("seed=-1: {} {}", has_seed ? "the seed of this run is" : "a random seed:", seed.text());
  return seed;
}

std::optional<Seed> sample_seed_of(const RunConfig& c) {
  if (c.sample.sample_seed != Seed(-1)) return c.sample.sample_seed;
  const Seed seed = random_seed();
  log_info("sample_seed=-1: a random seed: {}", seed.text());
  return seed;
}

}  // namespace

RunInfo make_run_info(const RunConfig& c, Processes& all) {
  RunInfo run{.name = c.run.run_name,
              .checkpoint_dir = c.loop.checkpoint_dir,
              .is_coordinator = all.is_coordinator(),
              .has_all_weights = all.alone() || c.hardware.hardware == "cpu",
              .metrics = c.metrics,
              .profile = c.profile,
              .timing_file = c.run.write_timing_metrics ? c.run.timing_metrics_file : ""};
  if (!run.name.empty() && !c.run.output_dir.empty()) {
    run.place = below(c.run.output_dir, run.name);
    run.folder = below(local_cache_path(c.run.output_dir), run.name);
    if (run.checkpoint_dir.empty()) run.checkpoint_dir = below(run.place, "checkpoints");
  }
  for (std::string* file : {&run.metrics.metrics_file, &run.timing_file}) {
    const std::string remote = std::exchange(*file, local_cache_path(*file));
    if (is_remote(remote)) run.uploads.emplace_back(*file, remote);
  }
  if (c.run.save_config_to_gcs) {
    check(!c.run.base_output_directory.empty(), Code::invalid_config,
          "save_config_to_gcs is true; expected a folder in base_output_directory");
    run.config_copy = below(below(c.run.base_output_directory, run.name), "config.yml");
  }
  check_same_keys(c.to_yaml(), all);
  RunConfig saved = c;
  if (run.is_coordinator) {
    saved.run.seed = seed_of(c, run);
    saved.sample.sample_seed = sample_seed_of(c);
  } else {
    run.metrics.write_metrics = run.profile.enable_profiler = false;
    run.timing_file.clear();
  }
  if (!all.alone()) {
    std::string seeds = saved.run.seed.text();
    if (saved.sample.sample_seed) seeds += " " + saved.sample.sample_seed->text();
    seeds = all.from_coordinator("seed", seeds);
    saved.run.seed = std::stoull(seeds);
    if (const size_t second = seeds.find(' '); second != seeds.npos)
      saved.sample.sample_seed = std::stoull(seeds.substr(second));
  }
  run.seed = saved.run.seed.value();
  run.sample_seed = saved.sample.sample_seed.value_or(saved.run.seed).value();
  run.config_yaml = saved.to_yaml();
  return run;
}

void check_has_folder(const RunInfo& run) {
  check(!run.name.empty(), Code::invalid_config, "run_name is empty; expected a name: run_name=NAME");
  check(!run.folder.empty(), Code::invalid_config, "output_dir is empty; expected a folder: output_dir=FOLDER");
}

}  // namespace md
