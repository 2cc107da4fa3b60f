#include "maxdiffusion/checkpoint/bucket_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/storage/repeater.h"
#include "maxdiffusion/storage/staging.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWaiting = ".waiting-";
constexpr std::chrono::seconds kPeriod{20};

/// Steps with their files' paths below the step's folder.
using Steps = std::map<int64_t, std::map<std::string, FoundFile>>;

Steps steps_in_bucket(const std::string& checkpoint_dir) {
  Steps steps;
  const size_t root = parts_of(below(checkpoint_dir, "")).path.size();
  for (FoundFile& f : all_below(checkpoint_dir)) {
    const std::string path = parts_of(f.location).path.substr(root);
    const size_t slash = std::min(path.find('/'), path.size());
    if (const auto step = step_of(path.substr(0, slash)); step && slash + 1 < path.size())
      steps[*step].emplace(path.substr(slash + 1), std::move(f));
  }
  return steps;
}

std::vector<int64_t> whole(const Steps& steps) {
  std::vector<int64_t> numbers;
  for (const auto& [step, files] : steps)
    if (files.contains(kState)) numbers.push_back(step);
  return numbers;
}

/// Steps that are whole on this machine and were not put yet.
std::vector<int64_t> waiting(const std::string& local) {
  std::vector<int64_t> steps;
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(local, ec)) {
    const std::string name = f.path().filename();
    if (!name.starts_with(kWaiting)) continue;
    const auto step = step_of(name.substr(std::string_view(kWaiting).size()));
    if (step && exists(checkpoint_folder(local, *step) + "/" + kState)) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::string marker(const std::string& local, int64_t step) { return local + "/" + kWaiting + std::to_string(step); }

/// Of those that wait, the ones that the bucket has not gone beyond.
std::vector<int64_t> newer(std::vector<int64_t> waiting, const std::vector<int64_t>& in_bucket) {
  if (!in_bucket.empty()) std::erase_if(waiting, [&](int64_t step) { return step <= in_bucket.back(); });
  return waiting;
}

void remove_from_bucket(const std::string& folder, bool committed) {
  if (committed) remove_file(below(folder, kState));
  remove_below(folder);
}

}  // namespace

std::vector<int64_t> bucket_checkpoints(const std::string& checkpoint_dir) {
  std::vector<int64_t> steps = whole(steps_in_bucket(checkpoint_dir));
  for (int64_t step : newer(waiting(staging(checkpoint_dir)), steps)) steps.push_back(step);
  return steps;
}

std::string set_aside_in_bucket(const std::string& checkpoint_dir, int64_t step) {
  const std::string state = below(checkpoint_folder(checkpoint_dir, step), kState),
                    other = below(checkpoint_folder(checkpoint_dir, step), std::string(kState) + ".damaged");
  const std::string local = staging(checkpoint_dir);
  if (find_file(state)) {
    put_text(other, get_text(state));
    remove_file(state);
  }
  remove_file(marker(local, step));
  remove_below(checkpoint_folder(local, step));
  return shown(other);
}

std::string local_checkpoint(const std::string& folder, CheckpointPart part, const std::string& component) {
  if (!is_remote(folder)) return folder;
  std::string local = staging(folder);
  const std::string step = fs::path(local).filename();
  std::map<std::string, FoundFile> files;
  const size_t root = parts_of(below(folder, "")).path.size();
  for (FoundFile& f : all_below(folder)) files.emplace(parts_of(f.location).path.substr(root), f);
  if (!files.contains(kState)) {
    const std::string dir = fs::path(local).parent_path();
    check(step_of(step) && exists(marker(dir, *step_of(step))) && exists(local + "/" + kState), Code::io,
          "'{}' is no checkpoint: it has no {}", shown(folder), kState);
    return local;
  }
  // What is here is of the same checkpoint, or goes.
  std::string checksums;
  if (const auto list = files.find(kChecksums); list != files.end()) checksums = get_text(list->second.location);
  if (const std::string here = local + "/" + kChecksums;
      checksums.empty() || !exists(here) || read_file(here) != checksums)
    remove_below(local);
  for (const auto& [name, found] : files) {
    const bool text = name.ends_with(".json"), state = name.starts_with("training_state/");
    const bool wanted = part == CheckpointPart::all || (state && text) ||
                        (part == CheckpointPart::model ? !state : name.starts_with(component + "/"));
    if (!wanted || name.ends_with(".damaged")) continue;
    const std::string path = local + "/" + name;
    if (!checksums.empty() && exists(path) && is_as_said(path, name, checksums)) continue;
    get_file(found, path);
  }
  return local;
}

struct CheckpointUploads::Impl {
  std::string dir, local;
  int keep;
  std::function<void()> before_commit;
  /// Of a checkpoint that is not whole in the bucket yet, by the hash of its checksums: files that this process has
  /// put.
  std::map<std::string, std::set<std::string>> there;
  std::unique_ptr<Repeater> repeater;  // ends first, since it uses the others

  void put(int64_t step, const Steps& steps) {
    Span span("put checkpoint", step);
    const std::string from = checkpoint_folder(local, step), to = checkpoint_folder(dir, step);
    const std::string which = content_hash(read_file(from + "/" + kChecksums));
    std::set<std::string>& done = there[which];
    const auto before = steps.find(step);
    if (before != steps.end() && (done.empty() || before->second.contains(kState))) {
      done.clear();
      remove_from_bucket(to, before->second.contains(kState));
    }
    // Weights that no run trains are in every checkpoint.
    std::vector<int64_t> others = whole(steps);
    std::erase(others, step);
    const std::string other = others.empty() ? "" : checkpoint_folder(dir, others.back());
    std::string checksums;
    if (!other.empty() && steps.at(others.back()).contains(kChecksums)) checksums = get_text(below(other, kChecksums));
    for (const auto& f : fs::recursive_directory_iterator(from)) {
      const std::string name = f.path().lexically_relative(from).string();
      if (!f.is_regular_file() || name == kState || done.contains(name)) continue;
      if (name.ends_with(".safetensors") && is_as_said(f.path(), name, checksums))
        put_file_like(below(other, name), f.path(), below(to, name));
      else
        put_file(f.path(), below(to, name));
      done.insert(name);
    }
    if (before_commit) before_commit();
    put_file(from + "/" + kState, below(to, kState));
    there.erase(which);
    remove_file(marker(local, step));
    log_info("checkpoint {} is in {}", step, shown(to));
  }

  /// Of checkpoints that nobody waits for any more.
  void trim_waiting() const {
    std::vector<int64_t> all = waiting(local);
    for (size_t i = 0; keep > 0 && i + static_cast<size_t>(keep) < all.size(); ++i) {
      remove_file(marker(local, all[i]));
      remove_below(checkpoint_folder(local, all[i]));
    }
  }

  void trim(const Steps& steps, int64_t newest) const {
    std::vector<int64_t> older = whole(steps);
    std::erase(older, newest);  // what was just put stays, whatever its number
    for (size_t i = 0; keep > 0 && i + static_cast<size_t>(keep) <= older.size(); ++i) {
      remove_from_bucket(checkpoint_folder(dir, older[i]), true);
      if (!exists(marker(local, older[i]))) remove_below(checkpoint_folder(local, older[i]));
    }
  }

  void put_all() {
    trim_waiting();
    for (int64_t step : waiting(local)) {
      const Steps steps = steps_in_bucket(dir);
      put(step, steps);
      trim(steps, step);
    }
  }
};

CheckpointUploads::CheckpointUploads(const std::string& checkpoint_dir, int keep, std::function<void()> before_commit)
    : impl_(std::make_unique<Impl>(
          Impl{checkpoint_dir, staging(checkpoint_dir), keep, std::move(before_commit), {}, nullptr})) {
  Impl& u = *impl_;
  const std::vector<int64_t> all = waiting(u.local), left = newer(all, whole(steps_in_bucket(u.dir)));
  for (int64_t step : all)
    if (!std::ranges::count(left, step)) remove_file(marker(u.local, step));
  for (int64_t step : left) log_info("checkpoint {} of an earlier run waits to be put into {}", step, shown(u.dir));
  u.repeater = std::make_unique<Repeater>(fmt::format("checkpoints for {} wait in '{}'", shown(u.dir), u.local),
                                          kPeriod, [&u] { u.put_all(); });
  if (!left.empty()) u.repeater->poke();
}

CheckpointUploads::~CheckpointUploads() = default;

void CheckpointUploads::announce(int64_t step) const {
  make_folders(impl_->local);
  write_file_atomic(marker(impl_->local, step), "");
}

void CheckpointUploads::add(int64_t step) {
  announce(step);  // what stood there before under this number may have been put meanwhile
  impl_->repeater->poke();
}

void CheckpointUploads::finish() {
  try {
    impl_->repeater->now();
  } catch (Error& e) {
    const std::vector<int64_t> left = waiting(impl_->local);
    throw e.note(
        fmt::format("checkpoint {} is whole in '{}' on this machine; the same command puts it into {} and goes "
                    "on from there",
                    left.empty() ? 0 : left.back(), impl_->local, shown(impl_->dir)));
  }
}

}  // namespace md
