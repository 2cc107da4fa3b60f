// Checkpoints in buckets have the same files. A bucket cannot rename, so completeness is defined differently:
// training_state/state.json is uploaded last and removed first, and a checkpoint without it is incomplete. Checkpoints
// are written to a folder of this machine that mirrors the bucket's (storage/local_cache.h), and uploaded on a separate
// thread. A file .waiting-STEP next to a checkpoint marks it as pending until its upload is complete; the next run with
// the same location finds it.
//
// With several processes, each writes its shards on its own machine and uploads them from there. Process 0 uploads
// state.json after all others have reported their upload. They communicate by keys that begin with the write's token:
// "TOKEN go" when the bucket's folder is empty, "TOKEN there PROCESS", "TOKEN done" when it is committed, or discarded.
// The file .part marks a folder as one process's part of a checkpoint.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/checkpoint/checkpoint.h"

namespace md {

/// Steps that are complete in the bucket, and newer ones that are complete on this machine and pending, ascending.
/// Throws io.
std::vector<int64_t> bucket_checkpoints(const std::string& checkpoint_dir);

/// Which files of a checkpoint to make available locally.
enum class CheckpointPart { all, model, component };
/// The folder of this machine where files of a checkpoint can be read: `folder` itself, or a copy of the bucket's.
/// `all`: all files; `model`: all without the arrays of the training state; `component`: files below `component`, and
/// the texts of training_state. Local files with the right bytes are not fetched again. Throws io.
std::string local_checkpoint(const std::string& folder, CheckpointPart part, const std::string& component = "");

/// Marks a checkpoint in a bucket as damaged, so that it is not listed; returns the new name of its state.json.
std::string quarantine_in_bucket(const std::string& checkpoint_dir, int64_t step);

/// The folder of this machine where a process writes its checkpoints for a bucket. Process 0 uses the location's local
/// copy; others use a subfolder of it, so that processes may share a machine.
std::string process_staging(const std::string& checkpoint_dir, const CheckpointProcesses& group);
/// File in a checkpoint's folder on this machine that says which write, of how many processes, it is a part of.
inline constexpr const char* kPart = ".part";
std::string part_text(const std::string& token, int64_t processes);

/// Called by all processes before they list the checkpoints: uploads what an earlier run of the same number of
/// processes left pending if every process still has its part; otherwise removes it with a warning. Throws io if an
/// upload fails.
void flush_pending_uploads(const std::string& checkpoint_dir, const CheckpointProcesses& group,
                           const std::function<void()>& before_commit);

/// Uploads checkpoints to a bucket, oldest first. Only the newest `keep` (0: all) pending ones are retained, and as
/// many in the bucket. Failed uploads are retried. Thread safe.
class CheckpointUploads {
 public:
  /// `before_commit` is called on the uploading thread before a checkpoint is committed; may be empty. Starts with the
  /// pending uploads of an earlier run; its incomplete ones are removed.
  CheckpointUploads(const std::string& checkpoint_dir, int keep, std::function<void()> before_commit,
                    CheckpointProcesses group = {});
  ~CheckpointUploads();
  /// Call before checkpoint `step` is written.
  void announce(int64_t step) const;
  /// Calls `change` while no upload is running.
  void between(const std::function<void()>& change);
  /// Queues checkpoint `step` for upload. Call when it is written.
  void add(int64_t step);
  /// Uploads all pending checkpoints; every process calls it. Throws io, in every process, naming where those that
  /// remain are stored.
  void finish();

 private:
  friend void flush_pending_uploads(const std::string&, const CheckpointProcesses&, const std::function<void()>&);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
