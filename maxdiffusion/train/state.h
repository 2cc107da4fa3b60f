// The training state as one value: made fresh or read from a checkpoint, carried by the loop, saved whole.
#pragma once

#include <functional>
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
  Array* saved_value(const std::string& input);
};

/// Starting values of the parameters in a table, by input name, in two calls. The first throws where there are none;
/// the second, of what the first returned, makes them while the program is compiled. The table holds all parameters, or
/// only the frozen ones where a checkpoint has the others; it lives until the second call has returned.
using InitialValues = std::function<std::function<NamedPieces()>(const ParamTable&)>;

/// The state that a run starts from, in host memory.
struct HostState {
  NamedPieces values;
  int64_t step = 0;
  Position data;
};
/// The state in the newest checkpoint of `checkpoint_dir`, whose moments are zeros where it has none, with a line in
/// the log; without a checkpoint, step 0 with the values of `initial`. `initial`
/// is called now; values are read or made when the result is called. `programs` must live until then.
std::function<HostState()> open_state(const StepPrograms& programs, const StepOptions& step,
                                      const std::string& checkpoint_dir, uint64_t seed, const InitialValues& initial);
/// Puts the state on the devices, with the shardings of the programs' inputs. Throws io naming an array that a
/// checkpoint lacks.
TrainState place_state(const Devices& devices, const StepPrograms& programs, const HostState& host,
                       const std::string& checkpoint_dir);

/// The trained values that are sampled and saved as the model: the averages where they are kept. Waits for the devices.
HostArrays trained_values(const Devices& devices, const StepPrograms& programs, const TrainState& state);

/// Adds to a checkpoint what makes it a whole model folder: weights of other models, configs, tokenizers. `trained`:
/// values of the trained parameters by input name (averages, where kept). Called on the writer's thread.
using CompleteCheckpoint = std::function<void(CheckpointContent&, const ParamTable&, const NamedPieces& trained)>;

/// Writes checkpoints on a thread of its own while training goes on. Keeps references to its arguments.
class StateSaver {
 public:
  /// `moments`: false leaves the optimizer's moments out. `before_commit`: see CheckpointWriter.
  StateSaver(const Devices& devices, const StepPrograms& programs, const StepOptions& step, std::string checkpoint_dir,
             int64_t keep, bool moments, uint64_t seed, CompleteCheckpoint complete,
             std::function<void()> before_commit = {});
  /// The state's arrays as they are now, as the checkpoint of step `at`, before the batch at `position`.
  void save(const TrainState& state, int64_t at, Position position);
  /// Waits for the write under way; throws its error.
  void finish() { writer_.finish(); }

 private:
  const Devices& devices_;
  const StepPrograms& programs_;
  bool averaged_, moments_;
  std::string checkpoint_dir_;
  uint64_t seed_;
  CompleteCheckpoint complete_;
  CheckpointWriter writer_;
};

}  // namespace md
