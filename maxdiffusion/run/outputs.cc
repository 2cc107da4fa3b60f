#include "maxdiffusion/run/outputs.h"

#include <algorithm>
#include <filesystem>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Downloads a file of another machine, or of an earlier run, from the bucket, unless the local file is at least as
/// long.
void bring(const FoundFile& found, const std::string& to) {
  std::error_code ec;
  if (const auto size = std::filesystem::file_size(to, ec); ec || static_cast<int64_t>(size) < found.size)
    get_file(found, to);
}

/// Whether a local folder is another one, or below it.
bool is_inside(const std::string& folder, const std::string& other) {
  const auto path = std::filesystem::weakly_canonical(folder), of = std::filesystem::weakly_canonical(other);
  return std::ranges::mismatch(of, path).in1 == of.end();
}

}  // namespace

Outputs::Outputs(const RunInfo& run) {
  check_has_folder(run);
  if (!run.is_coordinator) return;
  lock_.emplace(run.folder);
  if (!is_remote(run.checkpoint_dir) && !is_inside(run.checkpoint_dir, run.folder)) {
    check_writable(run.checkpoint_dir, "checkpoint_dir");
    checkpoints_lock_.emplace(run.checkpoint_dir, std::chrono::seconds(10), "checkpoint_dir");
  }
  std::vector<RemoteSync::Pair> pairs;
  if (is_remote(run.place)) {
    log_info("{}: written in '{}' and uploaded from there", shown(run.place), run.folder);
    lease_.emplace(run.place, this_process());
    const size_t root = split_location(below(run.place, "")).path.size();
    for (const FoundFile& f : list_all_files(run.place)) {
      const std::string name = split_location(f.location).path.substr(root);
      if (name == "config.yml" || name == "starts.jsonl" || name == "metrics.jsonl" || name.ends_with("/metrics.jsonl"))
        bring(f, run.folder + "/" + name);
    }
    pairs.push_back({run.folder, run.place});
  }
  for (const auto& [local, location] : run.uploads) {
    make_folders(std::filesystem::path(local).parent_path());
    if (const auto found = find_file(location)) bring(*found, local);
    pairs.push_back({local, location});
  }
  if (pairs.empty()) return;
  sync_ = std::make_unique<RemoteSync>(std::move(pairs), std::set<std::string>{"checkpoints", "cache"});
}

std::function<void()> Outputs::flushed() const {
  if (!sync_) return {};
  return [this] { sync_->changed(); };
}

std::function<void()> Outputs::before_commit() const {
  if (!sync_) return {};
  return [this] {
    sync_->settle();
    if (lease_) lease_->check();
  };
}

void Outputs::check_folder() const {
  if (lock_) lock_->check_folder();
}

void Outputs::finish() {
  if (sync_) sync_->settle();
}

void check_outputs(const RunInfo& run, const std::string& cache_dir) {
  check_has_folder(run);
  const auto check = [](const std::string& folder, const char* key) {
    if (!folder.empty() && !is_remote(folder)) check_writable(folder, key);
  };
  const auto check_parent = [&](const std::string& file, const char* key) {
    if (!file.empty() && !is_remote(file)) check(std::filesystem::path(file).parent_path().string(), key);
  };
  for (const char* part : {"samples", "checkpoints", "tensorboard"}) check(below(run.place, part), "output_dir");
  if (run.checkpoint_dir != below(run.place, "checkpoints")) check(run.checkpoint_dir, "checkpoint_dir");
  if (cache_dir != below(run.place, "cache")) check_parent(cache_dir, "dataset_save_location");
  check_parent(run.config_copy, "base_output_directory");
  if (run.metrics.write_metrics) check_parent(run.metrics.metrics_file, "metrics_file");
  check_parent(run.timing_file, "timing_metrics_file");
}

}  // namespace md
