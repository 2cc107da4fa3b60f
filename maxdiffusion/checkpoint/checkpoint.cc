// One rule keeps checkpoints whole: a name made of digits appears only by a rename of a finished, fsynced folder.
// Folders under construction or on their way out are ".tmp-<step>-<process>"; the one that a replacement moved aside,
// where the file system cannot exchange two names, is ".old-<step>-<process>".
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
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

namespace fs = std::filesystem;

constexpr const char* kState = "training_state/state.json";
constexpr const char* kArrays = "training_state/arrays.safetensors";

std::optional<int64_t> step_of(std::string_view name) {
  int64_t step = 0;
  auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool canonical = error == std::errc() && end == name.data() + name.size() && step >= 0;
  return canonical && std::to_string(step) == name ? std::optional(step) : std::nullopt;
}

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

void write_content(const std::string& folder, const CheckpointContent& c) {
  std::set<std::string> folders = {folder};
  auto prepare = [&](const std::string& relative) {
    check_relative(relative);
    const fs::path path = fs::path(folder) / relative;
    make_folders(path.parent_path());
    for (fs::path p = path.parent_path(); p.string().size() > folder.size(); p = p.parent_path()) folders.insert(p);
    return path.string();
  };
  auto write_text = [&](const std::string& relative, const std::string& text) {
    FileWriter w(prepare(relative));
    w.write(text.data(), text.size());
    w.close();
  };
  for (const auto& [name, text] : c.files) write_text(name, text);
  for (const auto& [name, file] : c.linked) {
    const std::string to = prepare(name);
    const fs::path from = fs::weakly_canonical(file);  // the hub's cache is made of symbolic links
    std::error_code ec;
    fs::create_hard_link(from, to, ec);
    if (ec) fs::copy_file(from, to, ec);
    check(!ec, Code::io, "copy '{}' to '{}': {}", from.string(), to, ec.message());
  }
  for (const auto& [component, arrays] : c.weights) {
    prepare(component + "/weights");
    write_sharded_safetensors(folder + "/" + component, weights_stem(fs::path(component).filename()), arrays);
  }
  if (c.more) c.more(folder);
  write_safetensors(prepare(kArrays), c.state);
  write_text(kState, c.state_json);
  for (const auto& f : folders) sync_folder(f);
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

std::string weights_stem(const std::string& folder) {
  for (const char* of_transformers : {"text_encoder", "image_encoder", "safety_checker"})
    if (folder.starts_with(of_transformers)) return "model";
  return "diffusion_pytorch_model";
}

std::string checkpoint_folder(const std::string& checkpoint_dir, int64_t step) {
  return (fs::path(checkpoint_dir) / std::to_string(step)).string();
}

std::vector<int64_t> list_checkpoints(const std::string& checkpoint_dir) {
  std::vector<int64_t> steps;
  std::error_code ec;
  for (const auto& f : fs::directory_iterator(checkpoint_dir, ec)) {
    auto step = step_of(f.path().filename().string());
    if (step && is_whole(f.path())) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

CheckpointContent read_training_state(const std::string& checkpoint_dir, int64_t step) {
  const std::string folder = checkpoint_folder(checkpoint_dir, step);
  CheckpointContent c;
  c.state_json = read_file(folder + "/" + kState);
  check(nlohmann::json::accept(c.state_json), Code::io, "read '{}/{}': not JSON", folder, kState);
  c.state = SafetensorsReader::open(folder + "/" + kArrays).tensors();
  return c;
}

void write_checkpoint(const std::string& checkpoint_dir, int64_t step, const CheckpointContent& content) {
  check(step >= 0, Code::internal, "checkpoint: step {} is negative", step);
  check(nlohmann::json::accept(content.state_json), Code::internal, "checkpoint {}: state_json is not JSON", step);
  make_folders(checkpoint_dir);
  const std::string temporary = side_name(checkpoint_dir, "tmp", step),
                    target = checkpoint_folder(checkpoint_dir, step);
  std::error_code ec;
  fs::remove_all(temporary, ec);
  try {
    make_folders(temporary);
    FolderLock lock(temporary);
    write_content(temporary, content);
    if (exists(target)) {
      replace_folder(checkpoint_dir, step, temporary, target);
    } else {
      rename_durable(temporary, target);
    }
  } catch (Error& e) {
    fs::remove_all(temporary, ec);
    throw e.note(fmt::format("while saving checkpoint {} to '{}'; earlier checkpoints are untouched", step, target));
  } catch (...) {
    fs::remove_all(temporary, ec);
    throw;
  }
}

struct CheckpointWriter::Impl {
  std::string dir;
  int keep;
  std::future<void> under_way;
};

CheckpointWriter::CheckpointWriter(std::string checkpoint_dir, int keep)
    : impl_(std::make_unique<Impl>(Impl{.dir = std::move(checkpoint_dir), .keep = keep, .under_way = {}})) {
  clean_leftovers(impl_->dir);
}

CheckpointWriter::~CheckpointWriter() {
  try {
    finish();
  } catch (const std::exception& e) {
    log_error("{}", e.what());
  }
}

void CheckpointWriter::save(int64_t step, std::function<CheckpointContent()> content) {
  finish();
  impl_->under_way =
      std::async(std::launch::async, [dir = impl_->dir, keep = impl_->keep, step, content = std::move(content)] {
        Span span("write checkpoint", step);
        write_checkpoint(dir, step, content());
        if (keep <= 0) return;
        auto steps = list_checkpoints(dir);
        std::erase(steps, step);  // what was just written stays, whatever its number
        for (size_t i = 0; i + static_cast<size_t>(keep) <= steps.size(); ++i) remove_checkpoint(dir, steps[i]);
      });
}

void CheckpointWriter::finish() {
  if (impl_->under_way.valid()) impl_->under_way.get();
}

}  // namespace md
