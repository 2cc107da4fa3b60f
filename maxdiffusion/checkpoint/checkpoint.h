// Checkpoints: a folder in diffusers' layout, plus training state. It is written under a temporary name, fsynced and
// renamed, so that a folder with its final name is complete. This module knows no models: it saves arrays and files by
// name.
//
//   CHECKPOINT_DIR/STEP/model_index.json, unet/config.json, unet/diffusion_pytorch_model.safetensors, …
//   CHECKPOINT_DIR/STEP/training_state/{state.json, arrays.safetensors}
//
// In a bucket (gs://, s3://) the files are the same; remote_checkpoints.h says when such a checkpoint is complete.
//
// Several processes write one checkpoint together; each writes the shards of arrays that it holds. If process 0 holds
// every array, the files are as above. Otherwise there are also
//
//   CHECKPOINT_DIR/STEP/training_state/{index.json, pieces-PROCESS-of-PROCESSES.safetensors}
//
// (shard_files.h), from which any number of processes read any parts. If each tensor of a component is whole in one
// process, the component's weights are shards in diffusers' layout, with its index. If a tensor of it is split among
// processes, its weights are arrays of the training state instead, "weights/<component>/<name>".
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

/// Everything one checkpoint holds, on the host. Each process passes the shards of arrays that it owns: every element
/// belongs to exactly one process. Shards that are computed on demand are computed one at a time, as they are written.
/// Everything else comes from process 0.
struct CheckpointContent {
  /// Folder ("unet") → arrays by published name.
  std::map<std::string, NamedShards> weights;
  /// Relative path ("unet/config.json", "model_index.json") → text.
  std::map<std::string, std::string> files;
  /// Relative path → file that becomes it: a hard link where the file system allows one, else a copy.
  std::map<std::string, std::string> linked;
  /// Writes more files into the folder before it gets its final name; may be empty.
  std::function<void(const std::string& folder)> write_extra_files;
  /// Optimizer moments and other arrays that a resumed run needs, by name.
  NamedShards state;
  /// Called with each array of `weights` and `state`, or each shard of one, before it is written. May throw; may be
  /// empty.
  std::function<void(const std::string& name, const HostArray& values)> inspect;
  /// JSON text: step, data position, config.
  std::string state_json;
};

/// The processes that write checkpoints together. They write into one folder that all of them see or, if the
/// checkpoints are in a bucket, each into a folder of its machine. Process 0 should have the first device of the mesh,
/// which owns the arrays that are not split. With one process the functions may be empty.
struct CheckpointProcesses {
  int64_t process = 0, processes = 1;
  /// A barrier that exchanges texts: returns once every process has called it. Process 0 gets every process's text, by
  /// number; the others get process 0's text only. Throws if a process can no longer take part. Called a few times for
  /// each checkpoint, on the thread that writes and on one that waits for it.
  std::function<std::vector<std::string>(const std::string& mine)> gather;
  /// Short texts by key, for buckets. put() is called once for a key; get() returns nothing before that. Thread safe.
  std::function<void(const std::string& key, const std::string& value)> put;
  std::function<std::optional<std::string>(const std::string& key)> get;

  bool alone() const { return processes == 1; }
  bool is_coordinator() const { return process == 0; }
};

/// The file whose presence says that a checkpoint is complete.
inline constexpr const char* kState = "training_state/state.json";
/// The step in a folder's name; none if it is not the name of a checkpoint.
std::optional<int64_t> step_of(std::string_view name);
/// "CHECKPOINT_DIR/STEP". With a component's name appended, a path for load_weights and diffusers.
std::string checkpoint_folder(const std::string& checkpoint_dir, int64_t step);
/// Steps of complete checkpoints, ascending. A folder is incomplete if its training_state/state.json is missing or
/// unreadable, as after a killed run. Empty if `checkpoint_dir` does not exist.
std::vector<int64_t> list_checkpoints(const std::string& checkpoint_dir);
/// Reads state.json and the arrays of training_state of one checkpoint (`state` and `state_json` of the result);
/// weights in diffusers' layout are not read. The result has the shards of all processes as memory maps;
/// ShardedArray::read returns any part. Throws io naming the missing or damaged file.
CheckpointContent read_training_state(const std::string& folder);
inline CheckpointContent read_training_state(const std::string& checkpoint_dir, int64_t step) {
  return read_training_state(checkpoint_folder(checkpoint_dir, step));
}
/// Writes one checkpoint on the calling thread and atomically replaces one of the same step. On failure (a full disk:
/// io) existing checkpoints are unchanged. Every process calls it; it returns when the checkpoint has its final name.
/// Most callers want CheckpointWriter, which also supports buckets.
void write_checkpoint(const std::string& checkpoint_dir, int64_t step, const CheckpointContent& content,
                      const CheckpointProcesses& processes = {});

/// Writes checkpoints on its own thread. At most one write runs at a time; save() waits for the previous one. An error
/// of the thread is thrown by the next save() or finish(). If `keep` > 0, all but the newest `keep` checkpoints are
/// removed after a complete write. For a bucket, it writes on this machine as above and uploads on another thread, for
/// which only finish() waits. A failed upload logs a warning, stays on this machine and is retried; finish() throws if
/// it still fails. Each process uploads what it has written, and all call finish().
class CheckpointWriter {
 public:
  /// Removes files of killed writers, with a log line, and restores a checkpoint that one was about to replace; in a
  /// folder shared by several processes, process 0 does so. `before_commit` is called on the uploading thread before a
  /// checkpoint in a bucket becomes complete.
  CheckpointWriter(const std::string& checkpoint_dir, int keep, CheckpointProcesses processes = {},
                   std::function<void()> before_commit = {});
  ~CheckpointWriter();
  /// Calls `content` on the writer's thread, so that fetching from the device overlaps with training.
  void save(int64_t step, std::function<CheckpointContent()> content);
  /// Waits for the write under way.
  void wait();
  /// Waits for the write under way and, for a bucket, until everything is uploaded. The destructor waits too, but can
  /// only log an error.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Published file stem of a model folder: "diffusion_pytorch_model" for unet, vae, transformer…; "model" for
/// text_encoder*.
std::string weights_stem(const std::string& folder);

}  // namespace md
