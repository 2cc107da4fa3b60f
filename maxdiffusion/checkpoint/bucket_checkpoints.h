// Checkpoints in buckets: the same files. A bucket renames nothing, so the rule is another: training_state/state.json
// is put last and removed first, and a checkpoint without it is none. Checkpoints are made in the folder of this
// machine that stands for the bucket's (storage/staging.h), and put from there on a thread of its own. Until one is in
// the bucket there is a file .waiting-<step> beside it, by which the next run of the same place finds it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace md {

/// Steps that are whole in the bucket, and those that wait on this machine and are newer, ascending. Throws io.
std::vector<int64_t> bucket_checkpoints(const std::string& checkpoint_dir);

/// Which files of a checkpoint.
enum class CheckpointPart { all, model, component };
/// The folder of this machine where files of a checkpoint can be read: `folder` itself, or a copy of what is in the
/// bucket: all files; those of the model, without the arrays of the training state; or, with training_state's texts,
/// those below `component`. Files that are here already with the right bytes are not fetched again. Throws io.
std::string local_checkpoint(const std::string& folder, CheckpointPart part, const std::string& component = "");

/// Makes a checkpoint of a bucket one that nobody reads; returns what its state.json is called now.
std::string set_aside_in_bucket(const std::string& checkpoint_dir, int64_t step);

/// Puts checkpoints into a bucket, oldest first. Of those that wait, only the newest `keep` (0: all) stay, and as many
/// are left in the bucket. What fails is tried again. Thread safe.
class CheckpointUploads {
 public:
  /// `before_commit` is called on the thread that puts, before a checkpoint counts; may be empty. Begins with what an
  /// earlier run has left waiting.
  CheckpointUploads(const std::string& checkpoint_dir, int keep, std::function<void()> before_commit);
  ~CheckpointUploads();
  /// The checkpoint is about to be written.
  void announce(int64_t step) const;
  /// It is written.
  void add(int64_t step);
  /// Puts all that wait. Throws io saying where they are.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace md
