// Loss on pictures that are not trained on, at fixed timesteps and with the same noise every time: comparable over a
// run. Source: Esser et al. 2024 (Stable Diffusion 3), appendix B.1; MaxDiffusion's timestep-based evaluation.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/tasks/latent_diffusion.h"
#include "maxdiffusion/tasks/run_config.h"
#include "maxdiffusion/train/step.h"

namespace md {

class Evaluation {
 public:
  /// Compiles. `task`: what is trained, of which models, noise and sizes are taken; the loss is neither weighted nor
  /// masked, captions are whole. `samples`: the task's fields, a row per picture. Throws invalid_config for timesteps
  /// out of range.
  Evaluation(const Devices& devices, const LatentDiffusion& task, Batch samples, const EvalKeys& keys,
             const StepOptions& step, uint64_t seed, const CompileConfig& compile);
  ~Evaluation();

  /// `value`: the array of a parameter, by input name. eval_loss is the mean over timesteps of eval_loss_timestep_T,
  /// the mean over pictures. Waits for the devices; logs each.
  std::map<std::string, double> run(int64_t step, const std::function<Array*(const std::string&)>& value);

 private:
  const Devices& devices_;
  Batch samples_;
  std::vector<int64_t> timesteps_;
  int64_t batch_, count_;
  std::unique_ptr<Program> program_;
  Array key_;
};

}  // namespace md
