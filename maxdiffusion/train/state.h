// The training state as one value: initialized or read from a checkpoint, updated by the loop, saved as a whole.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/train/programs.h"
#include "maxdiffusion/train/state_info.h"

namespace md {

struct TrainState {
  ArrayMap arrays;     // inputs that a step donates and returns updated
  ArrayMap read_only;  // inputs that a step only reads: frozen parameters, constants, the batch
  int64_t step = 0;    // updates done
  Position data;       // position before the batch of the next step

  /// Name of the array that is saved for a parameter: its moving average, if there is one.
  std::string saved_name(const std::string& input) const;
  Array* saved_value(const std::string& input);
};

/// Initial values of the parameters in a table, by input name, in two calls. The first throws if weights are missing;
/// the function that it returns computes them while the program is compiled. The table holds all parameters, or only
/// the frozen ones if a checkpoint has the others; it must live until the second call returns.
using InitialValues = std::function<std::function<NamedShards()>(const ParamTable&)>;

/// The initial state of a run in host memory: the shards of this process's devices.
struct HostState {
  NamedShards values;
  int64_t step = 0;
  Position data;
  DataIdentity dataset;     // that the checkpoint was saved with
  uint64_t bytes_read = 0;  // read from the checkpoint's files
};
/// Source of a state.
struct StateSource {
  std::string checkpoint_dir;
  uint64_t seed = 0;
  bool single_replica = false;          // one of the replicas (Devices::replicas) reads and broadcasts
  std::function<void()> before_commit;  // see CheckpointWriter; for pending uploads of an earlier run
  /// What the run trains in addition to the components of the step's parameters: a component that was trained before,
  /// and is frozen now, or the word of textual inversion.
  std::set<std::string> also_trained;
};
/// The state of the newest checkpoint that all processes can read, with a log line; missing moments are zeros. Without
/// a checkpoint: step 0 with the values of `initial`. Only parts on devices of this process are read. `initial` is
/// called immediately; values are read or computed when the result is called. `devices` and `programs` must live until
/// then.
std::function<HostState()> open_state(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                                      const StateSource& from, const InitialValues& initial);
/// Throws invalid_config, in all processes, if the newest checkpoint that is not damaged cannot be resumed by this run:
/// another optimizer or model wrote it, it holds something trained that this run does not train, or it lacks what this
/// run needs; io if all are damaged. Reads headers, no arrays, and changes nothing on disk. Returns what state.json of
/// that checkpoint says; none if there is no checkpoint, or another process reads it.
std::optional<StateInfo> check_resumes(const Devices& devices, const StepPrograms& programs, const StepOptions& step,
                                       const StateSource& from);
/// Moves a run's data to the position at which a checkpoint was saved. Data that has changed since is used as it is
/// now, with a warning that says what has changed: from the same position or, if the data lacks it, from the beginning
/// of the next epoch.
void resume_data(Dataset& data, const DataIdentity& now, const Position& at, const DataIdentity& then,
                 const std::string& checkpoint);
/// Puts the state on the devices, with the shardings of the programs' inputs. Throws io naming an array that the
/// checkpoint lacks.
TrainState place_state(const Devices& devices, const StepPrograms& programs, HostState host,
                       const std::string& checkpoint_dir);

/// The trained values for sampling: the moving averages, if there are any. Waits for the devices. Empty for joint
/// devices, where no process has all. On a CPU the values borrow the state's memory: the state must not change while
/// they are used.
HostArrays trained_values(const Devices& devices, const StepPrograms& programs, const TrainState& state);
/// trained_values of a state after its last step; the result owns the memory that it borrows.
HostArrays last_trained_values(const Devices& devices, const StepPrograms& programs, TrainState state);

/// Adds the files that make a checkpoint a complete model folder: weights of other models, configs, tokenizers.
/// `trained`: values of the trained parameters by input name (moving averages, if any). Called on the writer's thread.
using CompleteCheckpoint = std::function<void(CheckpointContent&, const ParamTable&, const NamedShards& trained)>;

/// The checkpoint content of a state of which this process has shards. Models whose parameters are all trained are
/// saved as weights of a model folder, everything else as training state. `averaged`: the weights are moving averages.
CheckpointContent state_content(const ParamTable& params, NamedShards state, bool averaged,
                                const CompleteCheckpoint& complete = {});

/// Writes checkpoints in the background, from a copy of the state, if free host memory (base/host_memory) suffices for
/// the copy and a step; otherwise writes array by array while training waits. Keeps references to its arguments.
class StateSaver {
 public:
  /// `moments`: false omits the optimizer's moments. `before_commit`: see CheckpointWriter. `also_trained`: see
  /// StateSource.
  StateSaver(const Devices& devices, const StepPrograms& programs, const StepOptions& step, std::string checkpoint_dir,
             int64_t keep, bool moments, uint64_t seed, CompleteCheckpoint complete,
             std::function<void()> before_commit = {}, DataIdentity dataset = {},
             std::set<std::string> also_trained = {});
  /// Warns if memory or disk may be too small for a checkpoint. Call before the first step.
  void warn_if_short_of_space(const TrainState& state) const;
  /// Saves the current arrays as the checkpoint after `updates` steps, before the batch at `position`.
  void save(const TrainState& state, int64_t updates, Position position);
  /// Waits for the write under way; throws its error.
  void wait() { writer_.wait(); }
  /// wait(), and until everything is uploaded.
  void finish() { writer_.finish(); }

 private:
  std::map<std::string, const Array*> saved(const TrainState& state) const;

  const Devices& devices_;
  const StepPrograms& programs_;
  int64_t step_bytes_ = 0;  // host memory that a step takes in addition to the state
  bool averaged_;
  std::vector<std::string> left_out_;  // prefixes of arrays that are not saved
  bool pauses_training_ = false;       // writes while training waits; set with a log line
  std::string checkpoint_dir_;
  uint64_t seed_;
  DataIdentity dataset_;
  std::set<std::string> also_trained_;
  CompleteCheckpoint complete_;
  CheckpointWriter writer_;
};

}  // namespace md
