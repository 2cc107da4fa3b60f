// Checkpoints in buckets: the same files. A bucket renames nothing, so the rule is another: training_state/state.json
// is put last and removed first, and a checkpoint without it is none. Checkpoints are made in the folder of this
// machine that is the copy of the bucket's (storage/local_cache.h), and put from there on a thread of its own. Until
// one is in the bucket there is a file .waiting-STEP next to it, by which the next run of the same place finds it.
//
// Of several processes each makes what it holds on its own machine, and puts it from there; process 0 puts what says
// that the checkpoint is whole when all others have said that theirs is there. They communicate by keys of the
// write's own token: "TOKEN go" when the bucket's folder is empty, "TOKEN there PROCESS", "TOKEN done" when it
// is committed, or discarded. The file .part in a folder says that it is a part.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/checkpoint/checkpoint.h"

namespace md {

/// Steps that are whole in the bucket, and those that wait whole on this machine and are newer, ascending. Throws io.
std::vector<int64_t> bucket_checkpoints(const std::string& checkpoint_dir);

/// Which files of a checkpoint.
enum class CheckpointPart { all, model, component };
/// The folder of this machine where files of a checkpoint can be read: `folder` itself, or a copy of what is in the
/// bucket: all files; those of the model, without the arrays of the training state; or, with training_state's texts,
/// those below `component`. Files that are here already with the right bytes are not fetched again. Throws io.
std::string local_checkpoint(const std::string& folder, CheckpointPart part, const std::string& component = "");

/// Marks a checkpoint in a bucket as damaged, so that it is not listed; returns the new name of its state.json.
std::string set_aside_in_bucket(const std::string& checkpoint_dir, int64_t step);

/// The folder of this machine where a process makes its checkpoints for a bucket: the location's own for process 0; for
/// others one in it, so that processes may share a machine.
std::string own_staging(const std::string& checkpoint_dir, const CheckpointProcesses& of);
/// In the folder of a checkpoint on this machine: which write of how many processes it is a part of.
inline constexpr const char* kPart = ".part";
std::string part_text(const std::string& token, int64_t processes);

/// Called by all processes before they ask which checkpoints there are: puts what an earlier run of as many has left
/// waiting, if each still has its part of it, and removes it with a warning if not. Throws io where it cannot be put.
void flush_pending_uploads(const std::string& checkpoint_dir, const CheckpointProcesses& of,
                           const std::function<void()>& before_commit);

/// Puts checkpoints into a bucket, oldest first. Of those that wait, only the newest `keep` (0: all) stay, and as many
/// are left in the bucket. What fails is tried again. Thread safe.
class CheckpointUploads {
 public:
  /// `before_commit` is called on the thread that puts, before a checkpoint counts; may be empty. Begins with what an
  /// earlier run has left waiting; what it has left half put is removed.
  CheckpointUploads(const std::string& checkpoint_dir, int keep, std::function<void()> before_commit,
                    CheckpointProcesses of = {});
  ~CheckpointUploads();
  /// The checkpoint is about to be written.
  void announce(int64_t step) const;
  /// Changes what may be about to be put, while nothing is.
  void between(const std::function<void()>& change);
  /// It is written.
  void add(int64_t step);
  /// Puts all that wait; called by all processes. Throws io saying where they are, in all of them.
  void finish();

 private:
  friend void flush_pending_uploads(const std::string&, const CheckpointProcesses&, const std::function<void()>&);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
