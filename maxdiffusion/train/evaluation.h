// Held-out loss: at fixed timesteps and with the same noise every time, so that values are comparable over a run.
// Source: Esser et al. 2024 (Stable Diffusion 3), appendix B.1; MaxDiffusion's timestep-based evaluation.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/seed.h"
#include "maxdiffusion/train/state.h"

namespace md {

/// Keys of held-out loss while training.
struct EvalKeys {
  int64_t eval_every = -1, eval_max_number_of_samples_in_bucket = 60;
  Seed eval_seed = 0;
  std::string eval_data_dir;
  std::vector<int64_t> timesteps_list = {125, 250, 375, 500, 625, 750, 875};
  template <class V>
  void visit(V&& v) {
    v("eval_every", eval_every, "steps between evaluations of the loss on held-out data; -1: none");
    v("eval_data_dir", eval_data_dir, "held-out data, of any kind that train_data_dir may be", KeyPath::input);
    v("eval_seed", eval_seed, "seed of the held-out loss's noise, the same for all runs; -1: the run's seed");
    v("timesteps_list", timesteps_list,
      "timesteps at which the held-out loss is measured; records that say their own are measured at that");
    v("eval_max_number_of_samples_in_bucket", eval_max_number_of_samples_in_bucket,
      "samples at each of these timesteps, the first of the held-out data");
  }
};

/// Held-out samples.
struct HeldOut {
  int64_t count = 0;
  /// Returns the fields of sample i, [1, …] each. Calls must not be concurrent.
  std::function<HostArrays(int64_t i)> read;
  /// The timestep of each sample; empty: every sample is measured at every timestep of the keys.
  std::vector<int64_t> timesteps;
};

class Evaluation {
 public:
  /// Compiles Task::timed_losses. Each task measures the timesteps that it trains; timesteps that no task trains are
  /// skipped. Throws invalid_config for timesteps out of range, no samples, and a task without timed losses. A sample's
  /// noise depends only on the seed and its number, not on batch size or timestep.
  Evaluation(const Devices& devices, const std::vector<const Task*>& tasks, HeldOut samples, const EvalKeys& keys,
             const StepOptions& step, uint64_t seed, const CompileConfig& compile);

  /// Returns eval_loss, the mean over timesteps of eval_loss_timestep_T, which are means over samples. Uses the
  /// parameters that would be saved. Waits for the devices; logs each value.
  std::map<std::string, double> run(int64_t step, TrainState& state);

 private:
  /// The losses of one task.
  struct Part {
    std::unique_ptr<Program> program;
    std::vector<std::pair<int64_t, int64_t>> points;  // timestep and sample, by timestep
    DType timestep_dtype = DType::s32;
    int64_t batch = 1;
  };
  void compile_part(Part& part, const Task& task, const TimedLosses& timed, const StepOptions& step,
                    const CompileConfig& config) const;
  /// Batch of the points from number `from` on; a last batch is filled with the last point.
  HostArrays batch_of(const Part& part, int64_t from) const;

  const Devices& devices_;
  HeldOut samples_;
  std::vector<Part> parts_;
  Array key_;
};

}  // namespace md
