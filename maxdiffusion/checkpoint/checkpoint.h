// Checkpoints: a folder in diffusers' layout, plus training state; written to a temporary name, fsynced and
// renamed, so that a folder with its final name is whole. It knows no models: it saves what it is given.
//
//   CHECKPOINT_DIR/STEP/model_index.json, unet/config.json, unet/diffusion_pytorch_model.safetensors, …
//   CHECKPOINT_DIR/STEP/training_state/{state.json, arrays.safetensors}
//
// In a bucket (gs://, s3://) the files are the same, and the rule of what is whole another: bucket_checkpoints.h.
//
// Several processes write one checkpoint together, each the shards of arrays that it holds. Where process 0 holds every
// array, the files are as above. Otherwise there are also
//
//   CHECKPOINT_DIR/STEP/training_state/{index.json, pieces-PROCESS-of-PROCESSES.safetensors}
//
// (shard_files.h), from which any number of processes read any parts. Weights of a component of which each tensor is
// whole in one process are the shards of diffusers' layout, with its index; a component of which a tensor is split
// among processes is not in that layout: its weights are arrays of the training state, "weights/<component>/<name>".
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "maxdiffusion/mesh/shards.h"

namespace md {

/// Everything one checkpoint holds, on the host. Of arrays, the shards that this process has: every element belongs to
/// exactly one process. Shards that are made when they are read are made one after the other, as they are written.
/// Everything else is taken from process 0.
struct CheckpointContent {
  /// Folder ("unet") → arrays by published name.
  std::map<std::string, NamedShards> weights;
  /// Relative path ("unet/config.json", "model_index.json") → text.
  std::map<std::string, std::string> files;
  /// Relative path → file that becomes it: a hard link where the file system allows one, else a copy.
  std::map<std::string, std::string> linked;
  /// Writes more files into the folder before it gets its final name; may be empty.
  std::function<void(const std::string& folder)> more;
  /// Optimizer moments and whatever else a run needs, by name.
  NamedShards state;
  /// Called with each array of `weights` and `state`, or each shard of one, before it is written; may throw, or be
  /// empty.
  std::function<void(const std::string& name, const HostArray& values)> inspect;
  /// JSON text: step, data position, config.
  std::string state_json;
};

/// The processes that write checkpoints together: into one folder that all of them see or, where that is in a bucket,
/// each into a folder of its machine. Process 0 should be that of the first device of the mesh, which owns the arrays
/// that are not split. For one process the functions may be empty.
struct CheckpointProcesses {
  int64_t process = 0, processes = 1;
  /// Returns when all of them have called it: in process 0 what each has given, by number; in the others what process 0
  /// has given, alone. Throws when one of them cannot any more. Called a few times for each checkpoint, on the thread
  /// that writes, and on one that waits for it.
  std::function<std::vector<std::string>(const std::string& mine)> gather;
  /// Short texts by key, for buckets: a key is put once, and get returns nothing before that. Thread
  /// safe.
  std::function<void(const std::string& key, const std::string& value)> put;
  std::function<std::optional<std::string>(const std::string& key)> get;

  bool alone() const { return processes == 1; }
  bool is_coordinator() const { return process == 0; }
};

/// The file of a checkpoint that says that the others are there.
inline constexpr const char* kState = "training_state/state.json";
/// The step that a folder's name says; nothing where it is not the name of a checkpoint.
std::optional<int64_t> step_of(std::string_view name);
/// "CHECKPOINT_DIR/STEP": what load_weights and diffusers take, with a component's name behind it.
std::string checkpoint_folder(const std::string& checkpoint_dir, int64_t step);
/// Step folders that are whole, ascending. A folder without a readable training_state/state.json is not; nor is any
/// folder that a killed run was still writing. None where the folder is missing.
std::vector<int64_t> list_checkpoints(const std::string& checkpoint_dir);
/// Reads, of one checkpoint's folder, state.json and the arrays of training_state (`state` and `state_json` of the
/// result; weights in diffusers' layout stay where they are). All shards of all processes are there, mapped, not read:
/// ShardedArray::read gives any part. Throws io naming the file that is missing or damaged.
CheckpointContent read_training_state(const std::string& folder);
inline CheckpointContent read_training_state(const std::string& checkpoint_dir, int64_t step) {
  return read_training_state(checkpoint_folder(checkpoint_dir, step));
}
/// Writes one checkpoint on the calling thread; one of the same step is replaced at once. On failure (a full disk: io)
/// everything that was there before is unchanged. Of several processes each calls it, and it returns when the
/// checkpoint has its name. Most callers want CheckpointWriter, which also takes buckets.
void write_checkpoint(const std::string& checkpoint_dir, int64_t step, const CheckpointContent& content,
                      const CheckpointProcesses& processes = {});

/// Writes on a thread of its own. At most one write is under way; save() waits for the previous one. An error of the
/// thread is thrown by the next save() or finish(). `keep` > 0 removes all but the newest `keep` after a whole write.
/// In a bucket: writes on this machine, as said above; puts from there, on another thread, for which only
/// finish() waits. What cannot be put is warned about and tried again, and an error of finish(); it stays on this
/// machine. Of several processes each puts what it has written, and all call finish().
class CheckpointWriter {
 public:
  /// Removes what killed writers left, logging it, and restores a checkpoint that one was about to replace; in a folder
  /// of several processes, process 0 does so.
  /// `before_commit` is called, on the thread that puts, before a checkpoint counts in a bucket.
  CheckpointWriter(const std::string& checkpoint_dir, int keep, CheckpointProcesses processes = {},
                   std::function<void()> before_commit = {});
  ~CheckpointWriter();
  /// `content` is called on the writer's thread, so that fetching from the device overlaps with training.
  void save(int64_t step, std::function<CheckpointContent()> content);
  /// Waits for the write under way.
  void wait();
  /// Waits for it and, of a bucket, until all is there. The destructor waits too, but can only log an error.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Published file stem of a model folder: "diffusion_pytorch_model" for unet, vae, transformer…; "model" for
/// text_encoder*.
std::string weights_stem(const std::string& folder);

}  // namespace md
