// The training state as one value: made fresh or read from a checkpoint, carried by the loop, saved whole.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/train/programs.h"

namespace md {

struct TrainState {
  ArrayMap arrays;   // what a step takes and returns
  ArrayMap kept;     // what steps only read: frozen parameters, constants, the batch
  int64_t step = 0;  // updates done
  Position data;     // before the batch of the next step

  /// The array of a parameter as it would be saved: its average, where one is kept.
  std::string saved_name(const std::string& input) const;
  Array* saved_value(const std::string& input);
};

/// Starting values of the parameters in a table, by input name, in two calls. The first throws where there are none;
/// the second, of what the first returned, makes them while the program is compiled. The table holds all parameters, or
/// only the frozen ones where a checkpoint has the others; it lives until the second call has returned.
using InitialValues = std::function<std::function<NamedShards()>(const ParamTable&)>;

/// The state that a run starts from, in host memory: the shards of this process's devices.
struct HostState {
  NamedShards values;
  int64_t step = 0;
  Position data;
  uint64_t bytes_read = 0;  // of the checkpoint's files
};
/// Where a state comes from, and how it is read.
struct StateSource {
  std::string checkpoint_dir;
  uint64_t seed = 0;
  bool single_replica = false;  // of replicas (Devices::replicas) one reads, and gives the others what it has read
  std::function<void()> before_commit;  // see CheckpointWriter; for uploads that an earlier run left pending
};
/// The state in the newest checkpoint that all processes can read (moments that it lacks are zeros), with a line in
/// the log; without a checkpoint, step 0 with the values of `initial`. Of a checkpoint those parts are read
/// that belong to devices of this process. `initial` is called now; values are read or made when the result is called.
/// `devices` and `programs` must live until then.
std::function<HostState()> open_state(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                                      const StateSource& from, const InitialValues& initial);
/// Puts the state on the devices, with the shardings of the programs' inputs. Throws io naming an array that a
/// checkpoint lacks.
TrainState place_state(const Devices& devices, const StepPrograms& programs, HostState host,
                       const std::string& checkpoint_dir);

/// The trained values that are sampled: the averages where they are kept. Waits for the devices. None of joint devices,
/// of which no process has all. On a CPU they are borrowed from the state, which must stay as it is while they are
/// used.
HostArrays trained_values(const Devices& devices, const StepPrograms& programs, const TrainState& state);
/// The same of a state that no step follows; what they are borrowed from lives as long as they do.
HostArrays last_trained_values(const Devices& devices, const StepPrograms& programs, TrainState state);

/// Adds to a checkpoint what makes it a whole model folder: weights of other models, configs, tokenizers. `trained`:
/// values of the trained parameters by input name (averages, where kept). Called on the writer's thread.
using CompleteCheckpoint = std::function<void(CheckpointContent&, const ParamTable&, const NamedShards& trained)>;

/// What a checkpoint holds of a state of which this process has shards: of a model whose every parameter is trained its
/// weights, as a model folder has them, and what else the state is. `averaged`: the weights are averages.
CheckpointContent state_content(const ParamTable& params, NamedShards state, bool averaged,
                                const CompleteCheckpoint& complete = {});

/// Writes checkpoints in the background, from a copy of the state, if free host memory (base/host_memory) holds one in
/// addition to what a step takes; otherwise while training waits, array by array. Keeps references to its arguments.
class StateSaver {
 public:
  /// `moments`: false leaves the optimizer's moments out. `before_commit`: see CheckpointWriter.
  StateSaver(const Devices& devices, const StepPrograms& programs, const StepOptions& step, std::string checkpoint_dir,
             int64_t keep, bool moments, uint64_t seed, CompleteCheckpoint complete,
             std::function<void()> before_commit = {});
  /// Warns if memory or the disk may be too small for a checkpoint. Before the first step.
  void warn_if_short_of_space(const TrainState& state) const;
  /// The state's arrays as they are now, as the checkpoint of step `at`, before the batch at `position`.
  void save(const TrainState& state, int64_t at, Position position);
  /// Waits for the write under way; throws its error.
  void finish() { writer_.finish(); }

 private:
  std::map<std::string, const Array*> saved(const TrainState& state) const;

  const Devices& devices_;
  const StepPrograms& programs_;
  int64_t step_bytes_ = 0;  // host memory that a step takes in addition to the state
  bool averaged_;
  std::vector<StateSlot> left_out_;
  bool pauses_training_ = false;  // writes while training waits, and has logged so
  std::string checkpoint_dir_;
  uint64_t seed_;
  CompleteCheckpoint complete_;
  CheckpointWriter writer_;
};

}  // namespace md
