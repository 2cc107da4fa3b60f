// One golden of a model: config, weights, inputs, and what diffusers or transformers made of them (outputs and all
// gradients), written by tools/golden/models.py. Runs the model here and measures the distance.
#pragma once

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/runtime/runtime.h"

namespace md {

using NamedTensors = std::map<std::string, Tensor>;

struct ModelCase {
  nlohmann::json config;
  HostArrays weights, inputs, outputs, dots, grads;  // names without their prefix; grads of inputs as "in.*"
  double noise_floor_outputs = 0, noise_floor_gradients = 0;
};
ModelCase load_case(const std::string& name);
/// Path of a file under tests/golden.
std::string golden_path(const std::string& name);

/// Inputs by name → outputs by name.
using Forward = std::function<NamedTensors(const Scope&, const nlohmann::json& config, NamedTensors& inputs)>;

struct ModelRun {
  HostArrays outputs, grads;  // as in the case
};
/// The model of the case and the gradients of sum over outputs of sum(out · dot). Fails when parameters and weights
/// are not the same set of names and shapes. `kernels` false: of composed operations alone, as on other devices.
ModelRun run_case(const ModelCase& c, const Forward& forward, const ScopeOptions& options = {}, bool kernels = true);

/// Largest relative distance ‖got − want‖ / ‖want‖ of a tensor, and which. A tensor that is zero by analysis (a bias
/// before a norm) counts by the largest norm of its group. Infinite when a name or a shape differs.
struct Distance {
  double value = 0;
  std::string name;
  double of_all = 0;  // of all tensors as one vector
};
Distance distance(const HostArrays& got, const HostArrays& want);

/// A case and how it is run.
struct Way {
  const char *name, *golden;
  ScopeOptions options = {};
  bool kernels = true;
};
void PrintTo(const Way& w, std::ostream* os);
/// Outputs and gradients are at most ten times as far from the golden, of a float64 run, as the reference's own float32
/// run.
void expect_reference(const Way& way, const Forward& forward);

const Devices& cpu();

}  // namespace md
