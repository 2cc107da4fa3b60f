// A checkpoint is complete by one rule: a folder whose name is a number only appears by renaming a finished, fsynced
// folder. Folders being written or removed are ".tmp-<step>-<process id>" (with several processes
// ".tmp-<step>-shared"). A replaced folder is ".old-<step>-<process id>" if the file system cannot exchange two names.
#include "maxdiffusion/checkpoint/checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <future>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/file_errors.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/shard_files.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string side_name(const std::string& dir, const char* kind, int64_t step) {
  return fmt::format("{}/.{}-{}-{}", dir, kind, step, ::getpid());
}

/// Held while a folder is being written; the kernel releases it when the process ends, however it ends.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder)
      : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
        locked_(fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) == 0) {}
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  bool is_locked() const { return locked_; }

 private:
  int fd_;
  bool locked_;
};

/// Removes a folder that is not listed. A failure only costs space, so it is logged, not thrown.
void remove_quietly(const std::string& folder) {
  std::error_code ec;
  fs::remove_all(folder, ec);
  if (ec) log_warning("remove '{}': {}", folder, ec.message());
}

/// Throws io if this process may not read it.
bool is_whole(const fs::path& folder) {
  const fs::path state = folder / kState;
  try {
    return !parse_json_or_discard(read_file(state)).is_discarded();
  } catch (const Error&) {
    if (const std::optional<Error> e = unreadable_in(state.parent_path())) throw *e;
    return false;
  }
}

void clean_leftovers(const std::string& dir) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (const auto& f : fs::directory_iterator(dir, ec)) found.push_back(f.path());
  for (const fs::path& f : found) {
    const std::string name = f.filename();
    if (!name.starts_with(".tmp-") && !name.starts_with(".old-")) continue;
    const auto end = name.find('-', 5);
    const auto step = end == std::string::npos ? std::nullopt : step_of(std::string_view(name).substr(5, end - 5));
    if (!step) continue;
    if (FolderLock lock(f); !lock.is_locked()) continue;  // another process is writing it
    if (name.starts_with(".old-") && !exists(checkpoint_folder(dir, *step)) && is_whole(f)) {
      log_warning("checkpoint {}: a run was killed while it replaced this checkpoint; the previous one is restored",
                  *step);
      rename_durable(f, checkpoint_folder(dir, *step));
      continue;
    }
    log_info("checkpoint {}: removing what an interrupted run left in '{}'", *step, f.string());
    remove_quietly(f);
  }
}

void check_relative(const std::string& path) {
  const fs::path p(path);
  const bool inside =
      !path.empty() && p.is_relative() && std::none_of(p.begin(), p.end(), [](auto& x) { return x == ".."; });
  check(inside, Code::internal, "checkpoint: '{}' is not a path inside its folder", path);
}

/// A folder under construction, and the subfolders that this process has written to.
class NewFolder {
 public:
  explicit NewFolder(std::string path) : path_(std::move(path)), folders_{path_} {}
  const std::string& path() const { return path_; }
  /// Path of a file that will be written; creates its folder.
  std::string prepare(const std::string& relative) {
    check_relative(relative);
    const fs::path path = fs::path(path_) / relative;
    make_folders(path.parent_path());
    for (fs::path p = path.parent_path(); p.string().size() > path_.size(); p = p.parent_path()) folders_.insert(p);
    return path.string();
  }
  void write(const std::string& relative, const std::string& text) {
    FileWriter w(prepare(relative));
    w.write(text.data(), text.size());
    w.close();
  }
  void sync() const {
    for (const auto& f : folders_) sync_folder(f);
  }

 private:
  std::string path_;
  std::set<std::string> folders_;
};

/// The arrays in each file that one process has written. Other processes send it to process 0.
struct Written {
  ShardIndex whole;   // in arrays.safetensors of process 0
  ShardIndex shards;  // in the process's own file of shards
  /// In the files of components, by array_of_weight.
  ShardIndex weights;
  FileChecksums checksums;  // of all files, for process 0

  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const ShardIndex* index : {&shards, &weights})
      for (const auto& [name, a] : *index)
        for (const FileShard& p : a.shards) names.insert(p.file);
    return names;
  }
  std::string text() const {
    return nlohmann::json{
        {"pieces", to_json(shards)}, {"weights", to_json(weights)}, {"checksums", md::to_json(checksums)}}
        .dump();
  }
  static Written from(const std::string& text, int64_t process) {
    const std::string source = fmt::format("message of process {}", process);
    const nlohmann::json j = parse_json(text);
    return {.whole = {},
            .shards = parse_index(j.at("pieces"), source),
            .weights = parse_index(j.at("weights"), source),
            .checksums = parse_checksums(j.at("checksums"), source)};
  }
};

/// Instructions from process 0 to the others after it has gathered their Written.
struct Plan {
  std::map<std::string, std::string> renames;
  std::string token;   // identifies this write
  bool joint = false;  // whether processes other than 0 have written anything

  std::string text() const { return nlohmann::json{{"renames", renames}, {"token", token}, {"joint", joint}}.dump(); }
  static Plan from(const std::string& text) {
    const nlohmann::json j = parse_json(text);
    return {j.at("renames"), j.at("token"), j.at("joint")};
  }
};

std::string new_token() {
  std::random_device bits;
  return fmt::format("{:08x}{:08x}{:08x}", bits(), bits(), bits());
}

/// Stem of the files that a process writes a component's weights to.
std::string process_stem(const std::string& component, int64_t process) {
  const std::string stem = weights_stem(fs::path(component).filename());
  return process == 0 ? stem : fmt::format("{}.process-{:05}", stem, process);
}

void write_texts(NewFolder& folder, const CheckpointContent& c) {
  for (const auto& [name, text] : c.files) folder.write(name, text);
  for (const auto& [name, file] : c.linked) {
    const std::string to = folder.prepare(name);
    const fs::path from = fs::weakly_canonical(file);  // the hub's cache consists of symbolic links
    std::error_code ec;
    fs::create_hard_link(from, to, ec);
    if (ec) fs::copy_file(from, to, ec);
    check(!ec, Code::io, "copy '{}' to '{}': {}", from.string(), to, ec.message());
  }
}

/// Writes the arrays that this process holds.
Written write_arrays(NewFolder& folder, const CheckpointContent& c, const CheckpointProcesses& group) {
  Written written;
  ArraysToWrite whole, shards;
  const std::string file = shard_file(group.process, group.processes);
  /// A part of the array `a` of the content; it is read when it is written.
  const auto part = [&c](const std::string& name, const ShardedArray& a, const Slice& slice) {
    return ArrayToWrite{{a.shape.dtype, slice.size}, [&c, &a, name, slice] {
                          HostArray values = a.read(slice);
                          if (c.inspect) c.inspect(name, values);
                          return values;
                        }};
  };
  const auto all_of = [&](const std::string& name, const ShardedArray& a) {
    return part(name, a, Slice::all(a.shape.dims));
  };
  auto add = [&](const std::string& name, const ShardedArray& a) {
    if (a.shards.empty()) return;
    IndexedArray entry{a.shape, {}};
    auto add_shard = [&](const Slice& slice) {
      entry.shards.push_back({slice, file, tensor_of_shard(name, slice)});
      shards[entry.shards.back().tensor] = part(name, a, slice);
    };
    if (a.complete()) {
      add_shard(Slice::all(a.shape.dims));
    } else {
      for (const Shard& p : a.shards) {
        const Shape expected{a.shape.dtype, p.slice.size};
        check(p.make || p.values.shape() == expected, Code::internal,
              "checkpoint: array '{}': the shard {} is {}; expected {}", name, to_string(p.slice),
              to_string(p.values.shape()), to_string(expected));
        add_shard(p.slice);
      }
    }
    check(written.shards.emplace(name, std::move(entry)).second, Code::internal, "checkpoint: two arrays are '{}'",
          name);
  };
  for (const auto& [component, arrays] : c.weights) {
    ArraysToWrite tensors;
    size_t none = 0;
    for (const auto& [name, a] : arrays) {
      none += a.shards.empty();
      if (a.complete()) tensors[name] = all_of(component + "/" + name, a);
    }
    if (tensors.size() + none < arrays.size()) {
      for (const auto& [name, a] : arrays) add(array_of_weight(component, name), a);
    } else if (!tensors.empty() || group.alone()) {
      folder.prepare(component + "/weights");
      for (const auto& [tensor, name] :
           write_sharded_safetensors(folder.path() + "/" + component, process_stem(component, group.process), tensors,
                                     group.is_coordinator() ? kMaxShardBytes : INT64_MAX)) {
        const Shape& shape = tensors.at(tensor).shape;
        written.weights[array_of_weight(component, tensor)] = {
            shape, {{Slice::all(shape.dims), component + "/" + name, tensor}}};
      }
    }
  }
  for (const auto& [name, a] : c.state) {
    if (group.is_coordinator() && a.complete()) {
      whole[name] = all_of(name, a);
      written.whole[name] = {a.shape, {{Slice::all(a.shape.dims), kArrays, name}}};
    } else {
      add(name, a);
    }
  }
  if (group.is_coordinator()) write_safetensors(folder.prepare(kArrays), whole);
  if (!shards.empty()) write_safetensors(folder.prepare(file), shards);
  return written;
}

void rename_files(NewFolder& folder, const std::set<std::string>& files, const Plan& plan) {
  for (const auto& [from, to] : plan.renames)
    if (files.contains(from)) rename_durable(folder.path() + "/" + from, folder.prepare(to));
}

/// Final names of a component's files, given in process order: those of one set of shards or, if some tensors are
/// `split` so that the component cannot be in diffusers' layout, those of training state files.
std::vector<std::string> final_names(const std::string& component, const std::vector<std::string>& files, bool split) {
  std::vector<std::string> names;
  for (size_t i = 0; i < files.size(); ++i) {
    std::string flat = files[i];
    std::replace(flat.begin(), flat.end(), '/', '-');
    names.push_back(split ? "training_state/" + flat
                          : component + "/" + shard_name(process_stem(component, 0), i, files.size()));
  }
  return names;
}

/// Runs in process 0 after gathering every process's Written: names weight files as one set of shards, writes the index
/// of array shards, and finally the state.json that marks the checkpoint as complete.
Plan join_files(NewFolder& folder, const Written& mine, const std::vector<std::string>& gathered,
                const std::string& state_json) {
  std::vector<Written> all = {mine};
  for (size_t p = 1; p < gathered.size(); ++p) all.push_back(Written::from(gathered[p], static_cast<int64_t>(p)));
  Plan plan{.renames = {}, .token = new_token()};
  ShardIndex shards, weights;
  std::map<std::string, std::vector<std::string>> components;  // their files, in the order of processes
  for (size_t p = 0; p < all.size(); ++p) {
    const std::string source = fmt::format("message of process {}", p);
    merge_index(shards, all[p].shards, source);
    merge_index(weights, all[p].weights, source);
    for (const auto& [name, a] : all[p].weights) {
      std::vector<std::string>& files = components[fs::path(a.shards[0].file).parent_path()];
      if (std::ranges::count(files, a.shards[0].file) == 0) files.push_back(a.shards[0].file);
    }
    plan.joint = plan.joint || (p > 0 && !all[p].checksums.empty());
  }
  check_tiled(weights, "write weights");  // no tensor is in two files
  for (const auto& [component, files] : components) {
    const std::string prefix = array_of_weight(component, ""),
                      index = process_stem(component, 0) + ".safetensors.index.json";
    const auto first = shards.lower_bound(prefix);
    const bool split = first != shards.end() && first->first.starts_with(prefix);
    const std::vector<std::string> names = final_names(component, files, split);
    for (size_t i = 0; i < files.size(); ++i)
      if (files[i] != names[i]) plan.renames[files[i]] = names[i];
    std::map<std::string, std::string> shard_of;
    int64_t bytes = 0;
    for (auto a = weights.lower_bound(prefix); a != weights.end() && a->first.starts_with(prefix); ++a) {
      FileShard shard = a->second.shards[0];
      if (const auto renamed = plan.renames.find(shard.file); renamed != plan.renames.end())
        shard.file = renamed->second;
      shard_of[shard.tensor] = fs::path(shard.file).filename();
      bytes += a->second.shape.bytes();
      if (split) merge_index(shards, {{a->first, {a->second.shape, {shard}}}}, shard.file);
    }
    if (split) {
      fs::remove(fmt::format("{}/{}/{}", folder.path(), component, index));
    } else if (files.size() > 1) {
      folder.write(component + "/" + index, shard_index(shard_of, bytes));
    }
  }
  rename_files(folder, mine.files(), plan);
  if (!shards.empty()) {
    merge_index(shards, mine.whole, kArrays);
    check_tiled(shards, fmt::format("write '{}'", kIndex));
    folder.write(kIndex, to_json(shards));
  }

  // The folder may also contain files of other processes.
  std::set<std::string> local_files = files_under(folder.path());
  FileChecksums sums = {{kState, checksum_of_text(state_json)}};
  for (const Written& one : all)
    for (const auto& [name, sum] : one.checksums) {
      const auto renamed = plan.renames.find(name);
      sums[renamed == plan.renames.end() ? name : renamed->second] = sum;
      local_files.erase(name);
    }
  sums.merge(checksums_of(folder.path(), local_files));
  folder.write(kChecksums, to_json(sums));
  folder.write(kState, state_json);
  return plan;
}

/// Replaces the existing `to` by `from`. Afterwards `from` does not exist.
void replace_folder(const std::string& dir, int64_t step, const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    sync_folder(dir);
    remove_quietly(from);
    return;
  }
  check(errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP, Code::io, "exchange '{}' and '{}': {}", from, to,
        std::strerror(errno));
  const std::string old = side_name(dir, "old", step);
  rename_durable(to, old);
  try {
    rename_durable(from, to);
  } catch (...) {
    ::rename(old.c_str(), to.c_str());
    throw;
  }
  remove_quietly(old);
}

/// Renames the folder first, so that a process killed half way leaves no checkpoint name with only some files.
void remove_checkpoint(const std::string& dir, int64_t step) {
  const std::string doomed = side_name(dir, "tmp", step);
  std::error_code ec;
  fs::rename(checkpoint_folder(dir, step), doomed, ec);
  if (ec) log_warning("remove checkpoint {}: {}", step, ec.message());
  remove_quietly(doomed);
}

}  // namespace

std::optional<int64_t> step_of(std::string_view name) {
  int64_t step = 0;
  auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool canonical = error == std::errc() && end == name.data() + name.size() && step >= 0;
  return canonical && std::to_string(step) == name ? std::optional(step) : std::nullopt;
}

std::string weights_stem(const std::string& folder) {
  for (const char* of_transformers : {"text_encoder", "image_encoder", "safety_checker"})
    if (folder.starts_with(of_transformers)) return "model";
  return "diffusion_pytorch_model";
}

std::string checkpoint_folder(const std::string& checkpoint_dir, int64_t step) {
  return below(checkpoint_dir, std::to_string(step));
}

std::vector<int64_t> checkpoint_folders(const std::string& checkpoint_dir) {
  if (is_remote(checkpoint_dir)) return bucket_checkpoints(checkpoint_dir);
  std::vector<int64_t> steps;
  std::error_code ec;
  fs::directory_iterator found(checkpoint_dir, ec);
  if (ec && ec != std::errc::no_such_file_or_directory && ec != std::errc::not_a_directory)
    throw io_error("read folder", checkpoint_dir, ec.value());
  for (const auto& f : found)
    if (const auto step = step_of(f.path().filename().string()); step && f.is_directory(ec)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::vector<int64_t> list_checkpoints(const std::string& checkpoint_dir) {
  std::vector<int64_t> steps = checkpoint_folders(checkpoint_dir);
  if (is_remote(checkpoint_dir)) return steps;
  std::erase_if(steps, [&](int64_t step) { return !is_whole(checkpoint_folder(checkpoint_dir, step)); });
  return steps;
}

std::string quarantine(const std::string& checkpoint_dir, int64_t step) {
  if (is_remote(checkpoint_dir)) return quarantine_in_bucket(checkpoint_dir, step);
  const std::string from = checkpoint_folder(checkpoint_dir, step);
  std::string to = from + ".damaged";
  for (int i = 2; exists(to); ++i) to = fmt::format("{}.damaged-{}", from, i);
  rename_durable(from, to);
  return to;
}

CheckpointContent read_training_state(const std::string& from) {
  CheckpointReader reader(from);
  verify_checksums(reader.folder(), "training_state");
  CheckpointContent c;
  c.state_json = reader.state_json();
  for (const auto& [name, array] : reader.arrays()) c.state[name] = reader.mapped(name);
  return c;
}

namespace {

/// `uploads`: null if `dir` is a folder that all processes see; otherwise each process has its own, for a bucket.
void write_in(const std::string& dir, int64_t step, const CheckpointContent& content, const CheckpointProcesses& group,
              CheckpointUploads* uploads) {
  const bool is_coordinator = group.is_coordinator(), shared = uploads == nullptr;
  check(step >= 0, Code::internal, "checkpoint: step {} is negative", step);
  check(group.process >= 0 && group.process < group.processes && (group.alone() || group.gather), Code::internal,
        "checkpoint: process {} of {}{}", group.process, group.processes, group.gather ? "" : ", without a connection");
  check(!is_coordinator || !parse_json_or_discard(content.state_json).is_discarded(), Code::internal,
        "checkpoint {}: state_json is not JSON", step);
  const auto gather = [&](const std::string& mine) {
    return group.alone() ? std::vector<std::string>{mine} : group.gather(mine);
  };
  make_folders(dir);
  const std::string temporary = group.alone() || !shared ? side_name(dir, "tmp", step)
                                                         : fmt::format("{}/.tmp-{}-shared", dir, step),
                    target = checkpoint_folder(dir, step);
  const bool makes = is_coordinator || !shared;
  std::error_code ec;
  const auto name_it = [&] {
    if (!exists(target)) return rename_durable(temporary, target);
    const auto replace = [&] { replace_folder(dir, step, temporary, target); };
    if (uploads) return uploads->between(replace);  // uploads contain files of one write only
    replace();
  };
  try {
    std::optional<FolderLock> lock;
    NewFolder folder(temporary);
    if (makes) {
      fs::remove_all(temporary, ec);
      make_folders(temporary);
      lock.emplace(temporary);
    }
    if (shared) gather("");  // the folder exists, without files of an earlier write
    if (is_coordinator) write_texts(folder, content);
    Written written = write_arrays(folder, content, group);
    if (is_coordinator && content.write_extra_files) content.write_extra_files(temporary);
    if (!is_coordinator) written.checksums = checksums_of(temporary, written.files());
    const std::vector<std::string> gathered = gather(is_coordinator ? "" : written.text());  // all files are written
    Plan plan;
    if (is_coordinator) plan = join_files(folder, written, gathered, content.state_json);
    plan = Plan::from(gather(plan.text()).front());
    if (!is_coordinator) rename_files(folder, written.files(), plan);
    if (!shared && plan.joint) folder.write(kPart, part_text(plan.token, group.processes));
    folder.sync();
    if (!is_coordinator && !shared && plan.joint) name_it();
    if (!is_coordinator && !shared && !plan.joint) fs::remove_all(temporary, ec);
    gather("");  // all files have their final names
    if (is_coordinator) name_it();
    gather("");  // and so has the checkpoint
  } catch (Error& e) {
    if (makes) fs::remove_all(temporary, ec);
    throw e.note(fmt::format("while saving checkpoint {} to '{}'; earlier checkpoints are untouched", step, target));
  } catch (...) {
    if (makes) fs::remove_all(temporary, ec);
    throw;
  }
}

}  // namespace

void write_checkpoint(const std::string& checkpoint_dir, int64_t step, const CheckpointContent& content,
                      const CheckpointProcesses& processes) {
  write_in(checkpoint_dir, step, content, processes, nullptr);
}

struct CheckpointWriter::Impl {
  std::string dir;  // on this machine
  int keep;
  CheckpointProcesses processes;
  std::unique_ptr<CheckpointUploads> uploads;
  std::future<void> under_way;
};

CheckpointWriter::CheckpointWriter(const std::string& checkpoint_dir, int keep, CheckpointProcesses processes,
                                   std::function<void()> before_commit)
    : impl_(std::make_unique<Impl>(Impl{checkpoint_dir, keep, std::move(processes), nullptr, {}})) {
  if (!is_remote(checkpoint_dir)) {
    if (impl_->processes.is_coordinator()) clean_leftovers(impl_->dir);
    return;
  }
  impl_->dir = process_staging(checkpoint_dir, impl_->processes);
  clean_leftovers(impl_->dir);
  impl_->uploads =
      std::make_unique<CheckpointUploads>(checkpoint_dir, keep, std::move(before_commit), impl_->processes);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    if (impl_->under_way.valid()) impl_->under_way.get();
    if (impl_->uploads && impl_->processes.alone()) impl_->uploads->finish();
  } catch (const std::exception& e) {
    log_error("{}", e.what());
  }
}

void CheckpointWriter::save(int64_t step, std::function<CheckpointContent()> content) {
  wait();
  impl_->under_way = std::async(std::launch::async, [i = impl_.get(), step, content = std::move(content)] {
    Span span("write checkpoint", step);
    if (i->uploads) i->uploads->announce(step);
    write_in(i->dir, step, content(), i->processes, i->uploads.get());
    if (i->uploads) return i->uploads->add(step);
    if (i->keep <= 0 || !i->processes.is_coordinator()) return;
    try {
      auto steps = list_checkpoints(i->dir);
      std::erase(steps, step);  // keeps the checkpoint just written, whatever its number
      for (size_t k = 0; k + static_cast<size_t>(i->keep) <= steps.size(); ++k) remove_checkpoint(i->dir, steps[k]);
    } catch (const Error& e) {  // of an older one, which another user wrote: training need not end for it
      log_warning("older checkpoints are not removed: {}", e.message());
    }
  });
}

void CheckpointWriter::wait() {
  if (impl_->under_way.valid()) impl_->under_way.get();
}

void CheckpointWriter::finish() {
  wait();
  if (impl_->uploads) impl_->uploads->finish();
}

}  // namespace md
