// The compiled training steps of a loop: one program for each task. Tasks differ in the shapes of their batches
// (aspect-ratio buckets) and share parameters and state; or they train different models alternately, and each program
// updates its part of the state of all models. A batch runs in the program for its shapes.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/step.h"

namespace md {

class StepPrograms {
 public:
  /// Traces a step for every task and logs its size. `title` is the prefix of log lines; empty: nothing is logged, and
  /// the programs are not run. Refers to `devices` and the tasks.
  StepPrograms(const Devices& devices, const std::vector<const Task*>& tasks, const StepOptions& options,
               const std::string& title);
  /// Compiles all programs; logs the time and the planned memory. `log_sharding`: also the sharding of each input.
  void compile(const CompileConfig& config, bool log_sharding);

  /// Parameters of all programs.
  const ParamTable& params() const { return params_; }
  /// Names of the arrays that a step updates.
  const std::set<std::string>& state_names() const { return state_; }
  bool is_state(const std::string& name) const { return state_.contains(name); }
  /// Samples in one step over all replicas.
  int64_t samples() const { return samples_; }

  size_t count() const { return graphs_.size(); }
  /// Index of the program for a batch. If tasks train different models: the one that trains the batch's timesteps, else
  /// one chosen from (seed, step) by Task::sampling_weight. Throws internal, with the batch's shapes, if there is none.
  size_t choose(const NamedShards& batch, uint64_t seed, int64_t step) const;
  const Program& program(size_t i) const { return programs_[i]; }
  const StepGraph& step(size_t i) const { return graphs_[i]; }
  double device_flops(size_t i) const;
  /// Bytes per device of inputs of other programs, except batches, that this program does not read.
  int64_t bytes_of_other_programs(size_t i) const;

 private:
  const Devices& devices_;
  std::vector<const Task*> tasks_;
  std::vector<StepGraph> graphs_;
  ParamTable params_;
  std::vector<Program> programs_;
  std::vector<std::string> titles_, names_;
  std::set<std::string> state_;
  int64_t samples_ = 1;
};

}  // namespace md
