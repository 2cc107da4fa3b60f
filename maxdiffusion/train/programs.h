// The compiled training steps of a loop: one program for each task. Tasks differ in the shapes of their batches alone
// (aspect-ratio buckets), so parameters and state are the same in all; a batch goes to the program whose shapes it has.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/train/step.h"

namespace md {

class StepPrograms {
 public:
  /// Traces a step for every task and logs its size. `title` begins every line. Refers to `devices`.
  StepPrograms(const Devices& devices, const std::vector<const Task*>& tasks, const StepOptions& options,
               const std::string& title);
  /// Compiles all; the log says how long it took and what memory it takes. `log_sharding`: also how each input lies on
  /// the mesh.
  void compile(const CompileConfig& config, bool log_sharding);

  /// What all have in common.
  const ParamTable& params() const { return graphs_.front().params; }
  const Program& any() const { return programs_.front(); }
  /// Names of the arrays that a step takes and gives back.
  const std::vector<std::string>& state_names() const { return state_; }
  bool is_state(const std::string& name) const;
  /// Of one step.
  int64_t samples() const { return samples_; }

  size_t count() const { return graphs_.size(); }
  /// The number of the program for a batch. Throws internal, with the batch's shapes, where there is none.
  size_t choose(const Batch& batch) const;
  const Program& program(size_t i) const { return programs_[i]; }
  double device_flops(size_t i) const;

 private:
  const Devices& devices_;
  std::vector<StepGraph> graphs_;
  std::vector<Program> programs_;
  std::vector<std::string> titles_, names_, state_;
  int64_t samples_ = 1;
};

}  // namespace md
