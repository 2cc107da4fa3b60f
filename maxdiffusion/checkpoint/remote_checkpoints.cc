#include "maxdiffusion/checkpoint/remote_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/shard_files.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/periodic_thread.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char *kWaiting = ".waiting-", *kDamaged = ".damaged";
constexpr std::chrono::seconds kPeriod{20};

/// Paths of each step's files, relative to the step's folder.
using Steps = std::map<int64_t, std::map<std::string, FoundFile>>;

Steps steps_in_bucket(const std::string& checkpoint_dir) {
  Steps steps;
  const size_t root = split_location(below(checkpoint_dir, "")).path.size();
  for (FoundFile& f : list_all_files(checkpoint_dir)) {
    const std::string path = split_location(f.location).path.substr(root);
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

/// Content of a folder's file .part.
struct Part {
  std::string token;
  int64_t processes = 0;
};
std::optional<Part> part_of(const std::string& folder) {
  const std::string file = folder + "/" + kPart;
  if (!exists(file)) return {};
  Part part;
  std::istringstream(read_file(file)) >> part.token >> part.processes;
  return part;
}

/// Steps that process 0, or a single process, has written on this machine and not uploaded.
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

/// Those of `waiting` that are complete in one process and newer than all in the bucket.
std::vector<int64_t> newer(const std::string& local, std::vector<int64_t> waiting,
                           const std::vector<int64_t>& in_bucket) {
  std::erase_if(waiting, [&](int64_t step) {
    return (!in_bucket.empty() && step <= in_bucket.back()) || part_of(checkpoint_folder(local, step));
  });
  return waiting;
}

/// Steps of which this process, not process 0, has written its part.
std::map<int64_t, Part> parts_in(const std::string& local) {
  std::map<int64_t, Part> parts;
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(local, ec))
    if (const auto step = step_of(f.path().filename().string()))
      if (const auto part = part_of(f.path())) parts[*step] = *part;
  return parts;
}

constexpr const char* kProcessFolder = ".process-";

/// Removes parts that jobs with another number of processes have written.
void remove_parts_of_other_jobs(const std::string& staging, int64_t processes) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (const auto& f : fs::directory_iterator(staging, ec)) found.push_back(f.path());
  for (const fs::path& f : found) {
    const std::string name = f.filename();
    if (name.starts_with(kProcessFolder) && !name.ends_with(fmt::format("-of-{:05}", processes))) fs::remove_all(f, ec);
  }
}

void remove_from_bucket(const std::string& folder, bool committed) {
  if (committed) remove_file(below(folder, kState));
  remove_folder(folder);
}

}  // namespace

std::vector<int64_t> bucket_checkpoints(const std::string& checkpoint_dir) {
  std::vector<int64_t> steps = whole(steps_in_bucket(checkpoint_dir));
  const std::string local = local_cache_path(checkpoint_dir);
  for (int64_t step : newer(local, waiting(local), steps)) steps.push_back(step);
  return steps;
}

std::string quarantine_in_bucket(const std::string& checkpoint_dir, int64_t step) {
  const std::string state = below(checkpoint_folder(checkpoint_dir, step), kState),
                    other = below(checkpoint_folder(checkpoint_dir, step), std::string(kState) + kDamaged);
  const std::string local = local_cache_path(checkpoint_dir);
  if (find_file(state)) {
    put_text(other, get_text(state));
    remove_file(state);
  }
  remove_file(marker(local, step));
  remove_folder(checkpoint_folder(local, step));
  return shown(other);
}

std::string local_checkpoint(const std::string& folder, CheckpointPart part, const std::string& component) {
  if (!is_remote(folder)) return folder;
  std::string local = local_cache_path(folder);
  const std::string step = fs::path(local).filename();
  std::map<std::string, FoundFile> files;
  const size_t root = split_location(below(folder, "")).path.size();
  for (FoundFile& f : list_all_files(folder)) files.emplace(split_location(f.location).path.substr(root), f);
  if (!files.contains(kState)) {
    const std::string dir = fs::path(local).parent_path();
    check(step_of(step) && exists(marker(dir, *step_of(step))) && exists(local + "/" + kState) && !part_of(local),
          Code::io, "'{}' is not a checkpoint: it has no {}", shown(folder), kState);
    return local;
  }
  // Keeps the local copy only if it is of the same checkpoint.
  std::string checksums;
  if (const auto list = files.find(kChecksums); list != files.end()) checksums = get_text(list->second.location);
  if (const std::string local_checksums = local + "/" + kChecksums;
      checksums.empty() || !exists(local_checksums) || read_file(local_checksums) != checksums)
    remove_folder(local);
  for (const auto& [name, found] : files) {
    const bool text = name.ends_with(".json"), state = name.starts_with("training_state/");
    const bool needed = part == CheckpointPart::all || (state && text) ||
                        (part == CheckpointPart::model ? !state : name.starts_with(component + "/"));
    if (!needed || name.ends_with(kDamaged)) continue;
    const std::string path = local + "/" + name;
    if (!checksums.empty() && exists(path) && matches_checksums(path, name, checksums)) continue;
    get_file(found, path);
  }
  return local;
}

std::string process_staging(const std::string& checkpoint_dir, const CheckpointProcesses& group) {
  const std::string local = local_cache_path(checkpoint_dir);
  return group.is_coordinator()
             ? local
             : fmt::format("{}/{}{:05}-of-{:05}", local, kProcessFolder, group.process, group.processes);
}

std::string part_text(const std::string& token, int64_t processes) { return fmt::format("{} {}\n", token, processes); }

struct CheckpointUploads::Impl {
  std::string dir, local;
  int keep;
  std::function<void()> before_commit;
  CheckpointProcesses group;
  /// What this process has uploaded of a checkpoint that is incomplete in the bucket, by the hash of its checksums or
  /// the token of its write.
  struct Upload {
    std::set<std::string> files;
    bool cleared = false, messages = false, all = false;
  };
  std::map<std::string, Upload> uploads;
  std::unique_ptr<PeriodicThread> thread;  // declared last, so that it ends before the members it uses

  std::string folder(int64_t step) const { return checkpoint_folder(local, step); }
  std::string key_of(int64_t step) const {
    if (const auto part = part_of(folder(step))) return part->token;
    return content_hash(read_file(folder(step) + "/" + kChecksums));
  }

  /// In process 0: removes files of other writes from the checkpoint's folder in the bucket.
  void clear(int64_t step, const Steps& steps) {
    Upload& upload = uploads[key_of(step)];
    const auto before = steps.find(step);
    if (before != steps.end() && (!upload.cleared || before->second.contains(kState))) {
      upload = {.files = {}, .messages = upload.messages};
      remove_from_bucket(checkpoint_folder(dir, step), before->second.contains(kState));
    }
    upload.cleared = true;
  }

  /// Uploads this process's files except those that mark the checkpoint as complete.
  void put_files(int64_t step, const Steps& steps) {
    Upload& upload = uploads[key_of(step)];
    if (upload.all) return;
    const std::string from = folder(step), to = checkpoint_folder(dir, step);
    // Weights that no run trains are in every checkpoint: copies them from another one.
    std::vector<int64_t> others = whole(steps);
    std::erase(others, step);
    const std::string other = others.empty() ? "" : checkpoint_folder(dir, others.back());
    std::string checksums;
    if (!other.empty() && steps.at(others.back()).contains(kChecksums)) checksums = get_text(below(other, kChecksums));
    for (const std::string& name : files_under(from)) {
      if (name == kIndex || name == kChecksums || name == kState || name == kPart || upload.files.contains(name))
        continue;
      const std::string file = from + "/" + name;
      if (name.ends_with(".safetensors") && matches_checksums(file, name, checksums))
        put_file_like(below(other, name), file, below(to, name));
      else
        put_file(file, below(to, name));
      upload.files.insert(name);
    }
    upload.all = true;
  }

  void commit(int64_t step) {
    const std::string from = folder(step), to = checkpoint_folder(dir, step);
    for (const char* name : {kIndex, kChecksums})
      if (exists(from + "/" + name)) put_file(from + "/" + name, below(to, name));
    if (before_commit) before_commit();
    put_file(from + "/" + kState, below(to, kState));
    end(step);
    log_info("checkpoint {} uploaded to {}", step, shown(to));
    trim(steps_in_bucket(dir), step);
  }

  /// Forgets a checkpoint after it is committed or discarded.
  void end(int64_t step) {
    const std::string key = key_of(step);
    if (group.put && part_of(folder(step))) group.put(key + " done", "");
    uploads.erase(key);
    remove_file(marker(local, step));
  }

  /// Uploads a checkpoint of process 0; returns whether it is complete in the bucket.
  bool put(int64_t step) {
    Span span("put checkpoint", step);
    const std::string key = key_of(step);
    const auto part = part_of(folder(step));
    if (!uploads[key].all || (part && !uploads[key].messages)) {
      const Steps steps = steps_in_bucket(dir);
      clear(step, steps);
      if (part && !std::exchange(uploads[key].messages, true)) group.put(key + " go", "");
      put_files(step, steps);
    }
    for (int64_t p = 1; part && p < group.processes; ++p)
      if (!group.get(fmt::format("{} there {}", key, p))) return false;
    commit(step);
    return true;
  }

  /// Discards all but the newest `keep` pending checkpoints.
  void trim_waiting() {
    std::vector<int64_t> all = waiting(local);
    for (size_t i = 0; keep > 0 && i + static_cast<size_t>(keep) < all.size(); ++i) {
      end(all[i]);
      remove_folder(folder(all[i]));
    }
  }

  void trim(const Steps& steps, int64_t newest) const {
    std::vector<int64_t> older = whole(steps);
    std::erase(older, newest);  // keeps the checkpoint just uploaded, whatever its number
    for (size_t i = 0; keep > 0 && i + static_cast<size_t>(keep) <= older.size(); ++i) {
      remove_from_bucket(checkpoint_folder(dir, older[i]), true);
      if (!exists(marker(local, older[i]))) remove_folder(folder(older[i]));
    }
  }

  /// Uploads what it can; returns whether it waits for other processes.
  bool put_all() {
    if (!group.is_coordinator()) return put_parts();
    trim_waiting();
    for (int64_t step : waiting(local))
      if (!put(step)) return true;
    return false;
  }

  /// In processes other than 0.
  bool put_parts() {
    bool waits = false;
    for (const auto& [step, part] : parts_in(local)) {
      if (group.get(part.token + " done")) {
        drop(step);
        continue;
      }
      Upload& upload = uploads[part.token];
      if (upload.messages) continue;
      if (!upload.all && !group.get(part.token + " go")) {
        waits = true;
        continue;
      }
      put_files(step, {});
      group.put(fmt::format("{} there {}", part.token, group.process), "");
      upload.messages = true;
    }
    return waits;
  }
  void drop(int64_t step) {
    uploads.erase(key_of(step));
    remove_folder(folder(step));
  }

  /// Runs `act`; an error of it in any process is thrown in all.
  void agree(const std::function<void()>& act) {
    std::string trouble;
    try {
      act();
    } catch (const std::exception& e) {
      trouble = e.what();
    }
    const std::vector<std::string> all = group.gather(trouble);
    for (size_t p = 1; group.is_coordinator() && p < all.size(); ++p)
      if (trouble.empty() && !all[p].empty()) trouble = fmt::format("process {}: {}", p, all[p]);
    trouble = group.gather(trouble).front();
    if (!trouble.empty()) throw Error(Code::io, trouble);
  }

  /// Uploads all pending checkpoints in all processes together, while none of them uploads alone.
  void upload_together() {
    for (bool pending = true; pending;) {
      std::string next;  // in process 0: the step and the key of its write
      Steps steps;
      agree([&] {
        if (!group.is_coordinator()) return;
        trim_waiting();
        const std::vector<int64_t> all = waiting(local);
        if (all.empty()) return;
        steps = steps_in_bucket(dir);
        clear(all[0], steps);
        next = nlohmann::json{{"step", all[0]}, {"key", key_of(all[0])}}.dump();
      });
      next = group.gather(next).front();
      pending = !next.empty();
      if (!pending) break;
      const nlohmann::json job = parse_json(next);
      const int64_t step = job.at("step");
      agree([&] {
        const bool mine = group.is_coordinator() || (part_of(folder(step)) && key_of(step) == job.at("key"));
        if (mine) put_files(step, steps);
      });
      agree([&] {
        if (group.is_coordinator()) commit(step);
      });
    }
    // All remaining local parts are in the bucket or discarded.
    if (!group.is_coordinator())
      for (const auto& [step, part] : parts_in(local)) drop(step);
  }
};

void flush_pending_uploads(const std::string& checkpoint_dir, const CheckpointProcesses& group,
                           const std::function<void()>& before_commit) {
  CheckpointUploads::Impl u{checkpoint_dir, process_staging(checkpoint_dir, group), 0, before_commit, group, {},
                            nullptr};
  std::map<int64_t, std::string> local_parts;
  std::vector<int64_t> in_bucket;
  u.agree([&] {
    if (!group.is_coordinator()) {
      for (const auto& [step, part] : parts_in(u.local)) local_parts[step] = part.token;
      return;
    }
    in_bucket = whole(steps_in_bucket(checkpoint_dir));
  });
  const std::vector<std::string> messages = group.gather(nlohmann::json(local_parts).dump());
  for (int64_t step : group.is_coordinator() ? waiting(u.local) : std::vector<int64_t>()) {
    const auto part = part_of(u.folder(step));
    const bool old = !in_bucket.empty() && step <= in_bucket.back();
    std::string why;
    if (part && part->processes != group.processes)
      why = fmt::format("{} processes wrote it; this run has {}", part->processes, group.processes);
    for (size_t p = 1; part && why.empty() && p < messages.size(); ++p) {
      const auto has = parse_json(messages[p]).get<std::map<int64_t, std::string>>();
      if (const auto found = has.find(step); found == has.end() || found->second != part->token)
        why = fmt::format("process {} no longer has its part", p);
    }
    if (!old && why.empty()) {
      log_info("checkpoint {} of an earlier run is uploaded to {}", step, shown(checkpoint_dir));
      continue;
    }
    if (!old)
      log_warning("checkpoint {} of an earlier run, not yet uploaded to {}, is discarded: {}", step,
                  shown(checkpoint_dir), why);
    u.end(step);
    if (part) remove_folder(u.folder(step));
  }
  u.upload_together();
}

CheckpointUploads::CheckpointUploads(const std::string& checkpoint_dir, int keep, std::function<void()> before_commit,
                                     CheckpointProcesses group)
    : impl_(std::make_unique<Impl>(Impl{checkpoint_dir,
                                        process_staging(checkpoint_dir, group),
                                        keep,
                                        std::move(before_commit),
                                        std::move(group),
                                        {},
                                        nullptr})) {
  Impl& u = *impl_;
  remove_parts_of_other_jobs(local_cache_path(checkpoint_dir), u.group.processes);
  std::vector<int64_t> left;
  if (u.group.is_coordinator()) {
    const Steps steps = steps_in_bucket(u.dir);
    const std::vector<int64_t> all = waiting(u.local);
    left = newer(u.local, all, whole(steps));
    for (int64_t step : all) {
      if (std::ranges::count(left, step)) continue;
      const bool part = part_of(u.folder(step)).has_value();
      if (part && (whole(steps).empty() || step > whole(steps).back()))
        log_warning(
            "checkpoint {} of an earlier run, of which a part is not yet uploaded to {}, is discarded: it needs the "
            "processes that wrote it",
            step, shown(u.dir));
      remove_file(marker(u.local, step));
      if (part) remove_folder(u.folder(step));
    }
    for (const auto& [step, files] : steps) {
      const bool damaged = files.contains(std::string(kState) + kDamaged);
      if (files.contains(kState) || damaged || std::ranges::count(left, step)) continue;
      log_info("checkpoint {}: removing what an interrupted run left in {}", step, shown(u.dir));
      remove_from_bucket(checkpoint_folder(u.dir, step), false);
    }
    for (int64_t step : left) log_info("checkpoint {} of an earlier run is uploaded to {}", step, shown(u.dir));
  }
  u.thread =
      std::make_unique<PeriodicThread>(fmt::format("checkpoints for {} wait for upload in '{}'", shown(u.dir), u.local),
                                       kPeriod, [&u] { return u.put_all(); });
  if (!left.empty()) u.thread->trigger();
}

CheckpointUploads::~CheckpointUploads() = default;

void CheckpointUploads::announce(int64_t step) const {
  if (!impl_->group.is_coordinator()) return;
  make_folders(impl_->local);
  write_file_atomic(marker(impl_->local, step), "");
}

void CheckpointUploads::between(const std::function<void()>& change) { impl_->thread->while_idle(change); }

void CheckpointUploads::add(int64_t step) {
  announce(step);  // an earlier checkpoint of this number may have been uploaded meanwhile
  impl_->thread->trigger();
}

void CheckpointUploads::finish() {
  Impl& u = *impl_;
  try {
    if (u.group.alone())
      u.thread->run_now();
    else
      u.thread->while_idle([&] { u.upload_together(); });
  } catch (Error& e) {
    const std::vector<int64_t> left = waiting(u.local);
    const std::string where =
        u.group.alone()
            ? fmt::format("checkpoint {} is whole in '{}'; the same command", left.empty() ? 0 : left.back(), u.local)
            : fmt::format(
                  "each process has its part of the newest checkpoint, this one in "
                  "'{}'; the same command, with as many processes on the same machines,",
                  u.local);
    throw e.note(fmt::format("{} uploads it to {} and resumes from it", where, shown(u.dir)));
  }
}

}  // namespace md
