#include "maxdiffusion/run/find_run.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/nearest.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/storage/location.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char *kConfig = "config.yml", *kCheckpoints = "checkpoints";

/// A location where a run may be.
struct Place {
  std::string folder, checkpoints;
};

bool is_same_place(const std::string& a, const std::string& b) {
  if (is_remote(a) || is_remote(b)) return a == b;
  return fs::weakly_canonical(fs::absolute(a)) == fs::weakly_canonical(fs::absolute(b));
}

/// Whether the config is the one that a run has saved.
bool is_of_run(const RunSearch& s) {
  return fs::path(s.file).filename() == kConfig && !s.run_name.empty() && !s.on_command_line.contains("run_name");
}

/// Folders that may contain the run: next to the config, output_dir of the command line, output_dir of the file.
std::vector<std::string> homes(const RunSearch& s) {
  std::vector<std::string> all;
  if (is_of_run(s)) all.push_back(fs::absolute(s.file).parent_path().parent_path());
  for (const std::string& folder : {s.output_dir, s.output_dir_of_file})
    if (!folder.empty() && std::ranges::none_of(all, [&](auto& other) { return is_same_place(other, folder); }))
      all.push_back(folder);
  return all;
}

std::string place_of(const RunSearch& s) {
  check(!s.output_dir.empty(), Code::invalid_config, "output_dir is empty; expected a folder: output_dir=FOLDER");
  return below(s.output_dir, s.run_name);
}

/// Possible locations of a config's run, in search order.
std::vector<Place> places(const RunSearch& s) {
  if (!s.checkpoint_dir.empty()) {
    const std::string folder = s.run_name.empty() ? "" : place_of(s);
    const bool has_checkpoint = !folder.empty() && (is_remote(folder) ? find_file(below(folder, kConfig)).has_value()
                                                                      : fs::is_directory(folder));
    return {{has_checkpoint ? folder : "", s.checkpoint_dir}};
  }
  std::vector<std::string> folders;
  if (is_of_run(s)) folders.push_back(fs::path(s.file).parent_path());
  if (!s.run_name.empty())
    for (const std::string& home : {s.output_dir, s.output_dir_of_file})
      if (!home.empty()) folders.push_back(below(home, s.run_name));
  std::vector<Place> all;
  for (std::string& folder : folders) {
    if (folder.empty()) folder = ".";
    if (std::ranges::none_of(all, [&](auto& p) { return is_same_place(p.folder, folder); }))
      all.push_back({folder, below(folder, kCheckpoints)});
  }
  return all;
}

/// Names of the runs with checkpoints in a local folder.
std::vector<std::string> runs_in(const std::string& home) {
  std::vector<std::string> names;
  std::error_code ec;
  if (!is_remote(home))
    for (const auto& f : fs::directory_iterator(home, ec)) try {
        if (!list_checkpoints(f.path() / kCheckpoints).empty()) names.push_back(f.path().filename());
      } catch (const Error&) {  // a run of another user, which this one may not read
      }
  std::ranges::sort(names);
  return names;
}

[[noreturn]] void refuse(const RunSearch& s, const std::vector<Place>& searched) {
  std::vector<std::string> where;
  for (const Place& p : searched) where.push_back(fmt::format("'{}'", shown(p.checkpoints)));
  const std::string run = s.run_name.empty() ? "" : fmt::format(" of the run '{}'", s.run_name);
  Error e(Code::invalid_config,
          where.empty()
              ? fmt::format("run_name is empty; expected a run with a checkpoint: the config trains a model ({})",
                            fmt::join(s.untrained, ", "))
          : s.untrained.empty()
              ? fmt::format("there is no checkpoint{} in {}", run, fmt::join(where, " or "))
              : fmt::format("there is no checkpoint{} in {}; expected one: the config trains a model ({})", run,
                            fmt::join(where, " or "), fmt::join(s.untrained, ", ")));
  std::string example = "FOLDER_OF_RUN";
  for (const std::string& home : homes(s)) {
    const std::vector<std::string> names = runs_in(home);
    if (names.empty()) {
      e.note(fmt::format("'{}': no run with a checkpoint", shown(home)));
      continue;
    }
    e.note(fmt::format("runs with checkpoints in '{}': {}", shown(home), fmt::join(names, ", ")));
    const std::string near = nearest(s.run_name, names);
    if (example == "FOLDER_OF_RUN" || !near.empty()) example = below(home, near.empty() ? names[0] : near);
  }
  throw e.note(fmt::format("try: {} generate {} prompt=…, or pretrained_model_name_or_path=FOLDER for another model",
                           program_name(), example));
}

}  // namespace

std::string config_file(const std::string& name) {
  if (!fs::is_directory(name)) return name;
  std::string file = (fs::path(name) / kConfig).string();
  if (exists(file)) return file;
  Error e(Code::invalid_config,
          fmt::format("'{}' is a folder without {}; expected a config file, or a run's folder", name, kConfig));
  if (exists(name + "/model_index.json"))
    e.note(fmt::format("try: a file of configs/ and pretrained_model_name_or_path={}", name));
  throw e;
}

ModelToSample model_to_sample(const RunSearch& s) {
  const std::string& model = s.model.pretrained_model_name_or_path;
  if (s.on_command_line.contains("pretrained_model_name_or_path")) return {model, s.model, s.output_dir};
  const std::vector<Place> searched = places(s);
  for (const Place& p : searched) {
    const std::vector<int64_t> steps = list_checkpoints(p.checkpoints);
    if (steps.empty()) continue;
    for (int64_t newer : checkpoint_folders(p.checkpoints))
      if (newer > steps.back())
        log_warning("{}/{} is damaged: state.json is missing or not JSON; an older checkpoint is used", p.checkpoints,
                    newer);
    ModelToSample out{checkpoint_folder(p.checkpoints, steps.back()), s.model, p.folder};
    log_info("the run's checkpoint {} is used", shown(out.model));
    ModelKeys& m = out.keys;
    for (const auto& [key, place] : {std::pair{"unet_checkpoint", &m.unet_checkpoint},
                                     {"lightning_repo", &m.lightning_repo},
                                     {"vae_file", &m.vae_file},
                                     {"single_file_config", &m.single_file_config},
                                     {"variant", &m.variant}})
      if (!s.on_command_line.contains(key)) place->clear();
    // The command line's output_dir is the images' folder, unless it is the run's parent folder.
    const bool is_home = !p.folder.empty() && !s.run_name.empty() && is_same_place(p.folder, place_of(s));
    if (p.folder.empty() || (s.on_command_line.contains("output_dir") && !is_home)) out.folder = s.output_dir;
    return out;
  }
  if (!s.untrained.empty() || is_of_run(s) || s.on_command_line.contains("checkpoint_dir")) refuse(s, searched);
  if (!searched.empty())
    log_warning("there is no checkpoint of the run '{}' in '{}'; the config's model '{}' is used", s.run_name,
                shown(searched[0].checkpoints), model);
  return {model, s.model, s.output_dir};
}

}  // namespace md
