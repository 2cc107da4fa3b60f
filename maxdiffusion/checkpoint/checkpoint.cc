// One rule keeps checkpoints whole: a name made of digits appears only by a rename of a finished, fsynced folder.
// Folders under construction or on their way out are ".tmp-<step>-<process id>" (of several processes
// ".tmp-<step>-shared"); the one that a replacement moved aside, where the file system cannot exchange two names, is
// ".old-<step>-<process id>".
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
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/bucket_checkpoints.h"
#include "maxdiffusion/checkpoint/checkpoint_reader.h"
#include "maxdiffusion/checkpoint/checksums.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/checkpoint/piece_files.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/storage/location.h"
#include "maxdiffusion/storage/staging.h"

namespace md {
namespace {

namespace fs = std::filesystem;

std::string side_name(const std::string& dir, const char* kind, int64_t step) {
  return fmt::format("{}/.{}-{}-{}", dir, kind, step, ::getpid());
}

/// Held for as long as a folder is being written; the kernel lets go of it when the process dies, however it dies.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder)
      : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
        held_(fd_ >= 0 && ::flock(fd_, LOCK_EX | LOCK_NB) == 0) {}
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  bool held() const { return held_; }

 private:
  int fd_;
  bool held_;
};

/// Removes a folder of a name that nobody reads. What cannot be removed only costs space, so it is told, not thrown.
void remove_quietly(const std::string& folder) {
  std::error_code ec;
  fs::remove_all(folder, ec);
  if (ec) log_warning("remove '{}': {}", folder, ec.message());
}

bool is_whole(const fs::path& folder) {
  const std::string state = folder / kState;
  if (!exists(state)) return false;
  try {
    return nlohmann::json::accept(read_file(state));
  } catch (const Error&) {
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
    if (FolderLock lock(f); !lock.held()) continue;  // another process is writing it now
    if (name.starts_with(".old-") && !exists(checkpoint_folder(dir, *step)) && is_whole(f)) {
      log_warning("checkpoint {}: a run was killed while it replaced it; the one before is back", *step);
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

/// A folder under construction, and which of its folders this process has written to.
class NewFolder {
 public:
  explicit NewFolder(std::string path) : path_(std::move(path)), folders_{path_} {}
  const std::string& path() const { return path_; }
  /// Path of a file that is about to be written.
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

/// What one process has written besides arrays.safetensors. Process 0 hears of it by the metadata of the piece files.
struct Written {
  PieceIndex pieces;
  std::map<std::string, std::vector<std::string>> weights;  // component → files in its folder

  std::map<std::string, std::string> metadata() const {
    return {{"format", "pt"}, {"index", to_json(pieces)}, {"weights", nlohmann::json(weights).dump()}};
  }
  static Written from(const std::map<std::string, std::string>& metadata, const std::string& file) {
    const auto index = metadata.find("index"), weights = metadata.find("weights");
    check(index != metadata.end() && weights != metadata.end(), Code::io, "read '{}': it does not say what it holds",
          file);
    return {parse_index(index->second, file), parse_json(weights->second)};
  }
};

/// Stem of the files that a process writes a component's weights to.
std::string own_stem(const std::string& component, int64_t process) {
  const std::string stem = weights_stem(fs::path(component).filename());
  return process == 0 ? stem : fmt::format("{}.process-{:05}", stem, process);
}

void write_texts(NewFolder& folder, const CheckpointContent& c) {
  for (const auto& [name, text] : c.files) folder.write(name, text);
  for (const auto& [name, file] : c.linked) {
    const std::string to = folder.prepare(name);
    const fs::path from = fs::weakly_canonical(file);  // the hub's cache is made of symbolic links
    std::error_code ec;
    fs::create_hard_link(from, to, ec);
    if (ec) fs::copy_file(from, to, ec);
    check(!ec, Code::io, "copy '{}' to '{}': {}", from.string(), to, ec.message());
  }
}

/// The arrays that this process holds.
Written write_arrays(NewFolder& folder, const CheckpointContent& c, const CheckpointProcesses& of) {
  Written written;
  HostArrays whole, pieces;
  const std::string file = piece_file(of.process, of.processes);
  auto add = [&](const std::string& name, const ArrayPieces& a) {
    if (a.pieces.empty()) return;
    IndexedArray entry{a.shape, {}};
    auto add_piece = [&](const Slice& slice, const HostArray& values) {
      const Shape expected{a.shape.dtype, slice.size};
      check(values.shape() == expected, Code::internal, "checkpoint: array '{}': the piece {} is {}; expected {}", name,
            to_string(slice), to_string(values.shape()), to_string(expected));
      entry.pieces.push_back({slice, file, tensor_of_piece(name, slice)});
      pieces[entry.pieces.back().tensor] = values;
    };
    if (a.complete()) {
      add_piece(Slice::all(a.shape.dims), a.whole());
    } else {
      for (const Piece& p : a.pieces) add_piece(p.slice, p.values);
    }
    check(written.pieces.emplace(name, std::move(entry)).second, Code::internal, "checkpoint: two arrays are '{}'",
          name);
  };
  for (const auto& [component, arrays] : c.weights) {
    HostArrays tensors;
    size_t none = 0;
    for (const auto& [name, a] : arrays) {
      none += a.pieces.empty();
      if (a.complete()) tensors[name] = a.whole();
    }
    if (tensors.size() + none < arrays.size()) {
      for (const auto& [name, a] : arrays) add(array_of_weight(component, name), a);
    } else if (!tensors.empty() || of.processes == 1) {
      folder.prepare(component + "/weights");
      written.weights[component] =
          write_sharded_safetensors(folder.path() + "/" + component, own_stem(component, of.process), tensors,
                                    of.process == 0 ? kMaxShardBytes : INT64_MAX);
    }
  }
  for (const auto& [name, a] : c.state) {
    if (of.process == 0 && a.complete()) {
      whole[name] = a.whole();
    } else {
      add(name, a);
    }
  }
  if (of.process == 0) write_safetensors(folder.prepare(kArrays), whole);
  if (of.process != 0 || !pieces.empty()) write_safetensors(folder.prepare(file), pieces, written.metadata());
  return written;
}

/// Of a component that is not in diffusers' layout, the tensors that some process had whole.
void move_to_state(NewFolder& folder, const std::string& component, const std::vector<std::string>& files,
                   PieceIndex& pieces) {
  for (const std::string& file : files) {
    std::string name = component + "-" + file;
    std::replace(name.begin(), name.end(), '/', '-');
    const std::string to = "training_state/" + name, path = folder.prepare(to);
    rename_durable(folder.path() + "/" + component + "/" + file, path);
    for (const auto& [tensor, a] : SafetensorsReader::open(path).tensors())
      merge_index(pieces, {{array_of_weight(component, tensor), {a.shape(), {{Slice::all(a.dims()), to, tensor}}}}},
                  to);
  }
  fs::remove(fmt::format("{}/{}/{}.safetensors.index.json", folder.path(), component, own_stem(component, 0)));
}

/// What process 0 does once the files of all processes are there: gives weights the names of one set of shards, and
/// makes the index of what is in pieces.
void join_arrays(NewFolder& folder, Written all, int64_t processes) {
  for (int64_t p = 1; p < processes; ++p) {
    const std::string file = folder.path() + "/" + piece_file(p, processes);
    const SafetensorsReader reader = SafetensorsReader::open(file);
    const Written one = Written::from(reader.metadata(), file);
    merge_index(all.pieces, one.pieces, file);
    for (const auto& [component, files] : one.weights)
      all.weights[component].insert(all.weights[component].end(), files.begin(), files.end());
    if (reader.tensors().empty()) fs::remove(file);
  }
  if (processes > 1) {
    for (const auto& [component, files] : all.weights) {
      const std::string prefix = array_of_weight(component, "");
      const auto split = all.pieces.lower_bound(prefix);
      if (split == all.pieces.end() || !split->first.starts_with(prefix)) {
        join_shards(folder.path() + "/" + component, own_stem(component, 0), files);
      } else {
        move_to_state(folder, component, files, all.pieces);
      }
    }
  }
  if (all.pieces.empty()) return;
  for (const auto& [name, a] : SafetensorsReader::open(folder.path() + "/" + kArrays).tensors())
    merge_index(all.pieces, {{name, {a.shape(), {{Slice::all(a.dims()), kArrays, name}}}}}, kArrays);
  check_tiled(all.pieces, fmt::format("write '{}'", kIndex));
  folder.write(kIndex, to_json(all.pieces));
}

/// Puts `from` in the place of `to`, which exists; afterwards `from` or its like is gone.
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

/// By a rename first, so that a kill half way leaves no folder of digits with half its files.
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
  for (const auto& f : fs::directory_iterator(checkpoint_dir, ec))
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

std::string set_aside(const std::string& checkpoint_dir, int64_t step) {
  if (is_remote(checkpoint_dir)) return set_aside_in_bucket(checkpoint_dir, step);
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

void write_checkpoint(const std::string& checkpoint_dir, int64_t step, const CheckpointContent& content,
                      const CheckpointProcesses& processes) {
  const bool alone = processes.processes == 1, leads = processes.process == 0;
  check(step >= 0, Code::internal, "checkpoint: step {} is negative", step);
  check(processes.process >= 0 && processes.process < processes.processes && (alone || processes.barrier),
        Code::internal, "checkpoint: process {} of {}{}", processes.process, processes.processes,
        processes.barrier ? "" : ", without a barrier");
  check(!leads || nlohmann::json::accept(content.state_json), Code::internal, "checkpoint {}: state_json is not JSON",
        step);
  auto meet = [&] {
    if (!alone) processes.barrier();
  };
  make_folders(checkpoint_dir);
  const std::string temporary = alone ? side_name(checkpoint_dir, "tmp", step)
                                      : fmt::format("{}/.tmp-{}-shared", checkpoint_dir, step),
                    target = checkpoint_folder(checkpoint_dir, step);
  std::error_code ec;
  try {
    std::optional<FolderLock> lock;
    NewFolder folder(temporary);
    if (leads) {
      fs::remove_all(temporary, ec);
      make_folders(temporary);
      lock.emplace(temporary);
    }
    meet();  // the folder is there, and nothing of an earlier write
    if (leads) write_texts(folder, content);
    Written written = write_arrays(folder, content, processes);
    if (leads && content.more) content.more(temporary);
    if (!leads) folder.sync();
    meet();  // all files are there
    if (leads) {
      join_arrays(folder, std::move(written), processes.processes);
      folder.write(kChecksums, checksums_of(temporary, {{kState, content.state_json}}));
      folder.write(kState, content.state_json);
      folder.sync();
      if (exists(target)) {
        replace_folder(checkpoint_dir, step, temporary, target);
      } else {
        rename_durable(temporary, target);
      }
    }
    meet();  // it has its name
  } catch (Error& e) {
    if (leads) fs::remove_all(temporary, ec);
    throw e.note(fmt::format("while saving checkpoint {} to '{}'; earlier checkpoints are untouched", step, target));
  } catch (...) {
    if (leads) fs::remove_all(temporary, ec);
    throw;
  }
}

struct CheckpointWriter::Impl {
  std::string dir;  // of this machine
  int keep;
  CheckpointProcesses processes;
  std::unique_ptr<CheckpointUploads> uploads;
  std::future<void> under_way;
};

CheckpointWriter::CheckpointWriter(const std::string& checkpoint_dir, int keep, CheckpointProcesses processes,
                                   std::function<void()> before_commit)
    : impl_(std::make_unique<Impl>(Impl{staging(checkpoint_dir), keep, std::move(processes), nullptr, {}})) {
  if (impl_->processes.process != 0) return;
  clean_leftovers(impl_->dir);
  if (is_remote(checkpoint_dir))
    impl_->uploads = std::make_unique<CheckpointUploads>(checkpoint_dir, keep, std::move(before_commit));
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& e) {
    log_error("{}", e.what());
  }
}

void CheckpointWriter::save(int64_t step, std::function<CheckpointContent()> content) {
  if (impl_->under_way.valid()) impl_->under_way.get();
  impl_->under_way = std::async(std::launch::async, [i = impl_.get(), step, content = std::move(content)] {
    Span span("write checkpoint", step);
    if (i->uploads) i->uploads->announce(step);
    write_checkpoint(i->dir, step, content(), i->processes);
    if (i->uploads) return i->uploads->add(step);
    if (i->keep <= 0 || i->processes.process != 0) return;
    auto steps = list_checkpoints(i->dir);
    std::erase(steps, step);  // what was just written stays, whatever its number
    for (size_t k = 0; k + static_cast<size_t>(i->keep) <= steps.size(); ++k) remove_checkpoint(i->dir, steps[k]);
  });
}

void CheckpointWriter::finish() {
  if (impl_->under_way.valid()) impl_->under_way.get();
  if (impl_->uploads) impl_->uploads->finish();
}

}  // namespace md
