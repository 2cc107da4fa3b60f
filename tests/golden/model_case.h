// One golden of a model: config, weights, inputs, and the outputs and all gradients of diffusers or transformers,
// written by tools/golden/models.py. Runs the model here and measures the distance.
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
  HostArrays weights, inputs, outputs, dots, grads;  // names without prefix; grads of inputs are "in.*"
  double noise_floor_outputs = 0, noise_floor_gradients = 0;
};
ModelCase load_case(const std::string& name);
/// Path of a file under tests/golden.
std::string golden_path(const std::string& name);

/// Maps inputs by name to outputs by name.
using Forward = std::function<NamedTensors(const Scope&, const nlohmann::json& config, NamedTensors& inputs)>;

struct ModelRun {
  HostArrays outputs, grads;  // named as in ModelCase
};
/// Runs the model and computes the gradients of Σ over outputs of sum(out · dot). Throws unless parameters and weights
/// have the same names and shapes. `kernels` false: uses only composed operations, as other devices do.
ModelRun run_case(const ModelCase& c, const Forward& forward, ScopeOptions options = {}, bool kernels = true);

/// The largest relative distance ‖got − want‖ / ‖want‖ of a tensor, and its name. The error of a tensor that is
/// analytically zero (a bias before a norm) is divided by the largest norm of its group. Infinite if names or shapes
/// differ.
struct Distance {
  double value = 0;
  std::string name;
  double of_all = 0;  // of all tensors as one vector
};
Distance distance(const HostArrays& got, const HostArrays& want);

/// A golden and the options of its run.
struct Variant {
  const char *name, *golden;
  ScopeOptions options = {};
  bool kernels = true;
};
void PrintTo(const Variant& w, std::ostream* os);
/// Expects that outputs and gradients are at most ten times as far from the float64 golden as the reference's float32
/// run.
void expect_reference(const Variant& variant, const Forward& forward);

const Devices& cpu();

}  // namespace md
