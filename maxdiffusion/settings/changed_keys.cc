#include "maxdiffusion/settings/changed_keys.h"

#include <filesystem>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/settings/renamed_keys.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Names of keys that affect a run's speed, log and outputs, but not what is trained.
std::set<std::string> without_effect_on_training() {
  std::set<std::string> names = {"attention",
                                 "remat_policy",
                                 "names_which_can_be_saved",
                                 "names_which_can_be_offloaded",
                                 "scan_layers",
                                 "flash_min_seq_length",
                                 "flash_block_sizes",
                                 "max_train_steps",
                                 "dataset_save_location",
                                 "grain_worker_count",
                                 "replicate_vae"};
  const auto add = [&names](auto keys) {
    KeyList list;
    list.add(keys);
    for (const ConfigKey& key : list.keys()) names.insert(key.name);
  };
  add(RunKeys()), add(HardwareKeys()), add(MeshConfig()), add(ShardingKeys()), add(TfrecordKeys()), add(EvalKeys());
  add(LoopKeys()), add(MetricsConfig()), add(ProfileConfig()), add(SampleFileKeys()), add(MediaChunkKeys());
  add(StepCacheKeys()), add(PromptKeys()), add(ControlKeys()), add(CompileConfig()), add(ReferenceKeys());
  // Sizes of videos, the trained guidance, the experts' range of timesteps, the batches, and the resumed state matter.
  for (const char* name : {"height", "width", "num_frames", "fps", "guidance_scale", "boundary_ratio",
                           "reuse_example_batch", "save_optimizer"})
    names.erase(name);
  return names;
}

/// Whether two values are paths of the same file or folder.
bool same_place(const std::string& a, const std::string& b) {
  std::error_code ec;
  return !a.empty() && !b.empty() && std::filesystem::equivalent(a, b, ec);
}

/// Whether processes of one run may have different values of a key: places on their own machines.
bool may_differ(const ConfigKey& key) {
  return key.path == KeyPath::output || key.path == KeyPath::output_or_word || key.name == "plugin";
}

RunConfig keys_of(const std::string& yaml) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  ConfigSource source = ConfigSource::from_text(yaml);
  source.rename(renamed_keys());
  keys.assign(source);
  return c;
}

/// Path of config.yml in the run's folder, or in its remote folder; empty: none.
std::string config_file(const RunInfo& run) {
  if (run.folder.empty()) return "";
  for (const std::string& folder : {run.folder, run.place})
    if (std::string file = below(folder, "config.yml"); find_file(file)) return file;
  return "";
}

}  // namespace

std::optional<RunConfig> config_of_run(const RunInfo& run) {
  std::string file;
  try {
    file = config_file(run);
    if (!file.empty()) return keys_of(get_text(file));
  } catch (const Error& e) {
    log_warning("{}: the run's former keys cannot be read: {}", shown(file), e.what());
  }
  return std::nullopt;
}

void check_same_keys(const std::string& mine, Processes& all) {
  if (all.alone()) return;
  const std::vector<std::string> found = all.gather("keys", mine);
  RunConfig first = keys_of(found[0]);
  KeyList of_first;
  of_first.add(first);
  std::optional<Error> other;
  for (size_t rank = 1; rank < found.size() && !other; ++rank) {
    RunConfig config = keys_of(found[rank]);
    KeyList keys;
    keys.add(config);
    for (size_t i = 0; i < keys.keys().size() && !other; ++i) {
      const ConfigKey& key = keys.keys()[i];
      const std::string is = key.print(), expected = of_first.keys()[i].print();
      if (is == expected || may_differ(key)) continue;
      other.emplace(Code::invalid_config, fmt::format("{} is {} in process {}; expected {}, as in process 0", key.name,
                                                      shortened(is, 80), rank, shortened(expected, 80)));
      other->note("try: the same command for all processes");
    }
  }
  throw_together(all, "compared keys", other);
}

void report_changed_keys(const RunInfo& run) {
  if (list_checkpoints(run.checkpoint_dir).empty()) return;
  std::optional<RunConfig> before = config_of_run(run);
  if (!before) return;
  RunConfig now = keys_of(run.config_yaml);
  KeyList old_keys, new_keys;
  old_keys.add(*before), new_keys.add(now);
  const std::set<std::string> unimportant = without_effect_on_training();
  std::string others;
  for (size_t i = 0; i < new_keys.keys().size(); ++i) {
    const ConfigKey& key = new_keys.keys()[i];
    const std::string is = key.print(), was = old_keys.keys()[i].print();
    if (is == was || key.name == "seed" || (key.type == "text" && same_place(is, was))) continue;
    const std::string line = fmt::format("{} is {}, was {}", key.name, shortened(is, 80), shortened(was, 80));
    if (unimportant.contains(key.name))
      others += (others.empty() ? "" : "; ") + line;
    else
      log_warning("{} in {}; the new value is used", line, shown(config_file(run)));
  }
  if (!others.empty()) log_info("{} in {}", others, shown(config_file(run)));
}

}  // namespace md
