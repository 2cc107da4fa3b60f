#include "tests/golden/model_case.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/one_device.h"

namespace md {
namespace {

double norm(const std::vector<double>& v) {
  double s = 0;
  for (double x : v) s += x * x;
  return std::sqrt(s);
}

/// The weight of a parameter in its storage type; layers of a stacked parameter are concatenated.
HostArray weight_of(const Param& p, const HostArrays& weights, std::map<std::string, int>& used) {
  auto one = [&](const std::string& path, const Dims& dims) {
    auto it = weights.find(path);
    check(it != weights.end(), Code::io, "there is no weight '{}'", path);
    check(it->second.dims() == dims, Code::io, "weight '{}' is {}, the model expects {}", path,
          to_string(it->second.shape()), to_string(dims));
    ++used[path];
    return it->second.cast(p.shape.dtype);
  };
  if (p.stacked == 0) return one(p.path, p.shape.dims);
  HostArray all(p.shape);
  const Dims row(p.shape.dims.begin() + 1, p.shape.dims.end());
  for (int64_t i = 0; i < p.stacked; ++i) {
    HostArray layer = one(layer_path(p.path, i), row);
    std::memcpy(all.mutable_data() + static_cast<size_t>(i) * layer.bytes(), layer.data(), layer.bytes());
  }
  return all;
}

/// Adds a gradient under its published names.
void put_gradient(const Param& p, const HostArray& g, HostArrays& grads) {
  if (p.stacked == 0) {
    grads[p.path] = g;
    return;
  }
  const Dims row(p.shape.dims.begin() + 1, p.shape.dims.end());
  for (int64_t i = 0; i < p.stacked; ++i) {
    HostArray layer(Shape{g.dtype(), row});
    std::memcpy(layer.mutable_data(), g.data() + static_cast<size_t>(i) * layer.bytes(), layer.bytes());
    grads[layer_path(p.path, i)] = layer;
  }
}

}  // namespace

std::string golden_path(const std::string& name) {
  const char* folder = std::getenv("MD_TEST_GOLDENS");
#ifdef MD_SOURCE_DIR  // unset in programs that are copied elsewhere (device_tests)
  if (!folder || !*folder) folder = MD_SOURCE_DIR "/tests/golden";
#endif
  check(folder && *folder, Code::invalid_config, "MD_TEST_GOLDENS is not set; expected the folder of the goldens");
  return std::string(folder) + "/" + name;
}

const Devices& cpu() { return one_device(); }

ModelCase load_case(const std::string& name) {
  ModelCase c;
  c.config = parse_json(read_file(golden_path(name + "/config.json")));
  c.weights = SafetensorsReader::open(golden_path(name + "/weights.safetensors")).tensors();
  auto golden = SafetensorsReader::open(golden_path(name + "/golden.safetensors"));
  for (const auto& [key, array] : golden.tensors()) {
    const size_t dot = key.find('.');
    const std::string kind = key.substr(0, dot), rest = key.substr(dot + 1);
    HostArrays& group = kind == "in" ? c.inputs : kind == "out" ? c.outputs : kind == "dot" ? c.dots : c.grads;
    group[rest] = array;
  }
  c.noise_floor_outputs = std::stod(golden.metadata().at("noise_floor_outputs"));
  c.noise_floor_gradients = std::stod(golden.metadata().at("noise_floor_gradients"));
  return c;
}

ModelRun run_case(const ModelCase& c, const Forward& forward, ScopeOptions options, bool kernels) {
  // Other devices round the inputs of f32 products to 8 or 10 bits unless this is asked for.
  if (test_hardware() != "cpu") options.precision = Precision::highest;
  GraphOptions on = cpu().graph_options();
  if (!kernels) on.cpu_kernels = {};
  Graph g(on);
  ParamTable table;
  HostArrays feed;
  NamedTensors inputs, dots;
  for (const auto& [name, array] : c.inputs) {
    inputs[name] = g.input("in/" + name, array.shape());
    feed["in/" + name] = array;
  }
  for (const auto& [name, array] : c.dots) {
    dots[name] = g.input("dot/" + name, array.shape());
    feed["dot/" + name] = array;
  }
  const NamedTensors arrays = inputs;
  const NamedTensors outputs = forward(Scope(g, table, "model", options), c.config, inputs);
  Tensor loss;
  for (const auto& [name, dot] : dots) {
    Tensor term = sum(cast(outputs.at(name), DType::f32) * dot);
    loss = loss ? loss + term : term;
  }

  std::map<std::string, int> used;
  std::vector<Tensor> expected;
  for (const Param& p : table.params()) {
    feed[p.input] = weight_of(p, c.weights, used);
    expected.push_back(p.value);
  }
  check(used.size() == c.weights.size(), Code::io, "the model uses {} of {} weights", used.size(), c.weights.size());
  std::vector<std::string> input_grads;
  for (const auto& [name, t] : arrays)
    if (c.grads.contains("in." + name)) {
      input_grads.push_back("in." + name);
      expected.push_back(t);
    }
  const std::vector<Tensor> grads = grad(loss, expected);

  for (const auto& [name, t] : outputs) g.output("out/" + name, cast(t, DType::f32));
  for (size_t i = 0; i < grads.size(); ++i)
    g.output("grad/" + std::to_string(i), cast(grads[i] ? grads[i] : zeros_like(expected[i]), DType::f32));
  std::vector<HostArray> arguments;
  for (const auto& in : g.inputs()) arguments.push_back(feed.at(in.name));
  const std::vector<HostArray> results = evaluate(cpu(), g, arguments);

  ModelRun run;
  size_t next = 0;
  for (const auto& [name, t] : outputs) run.outputs[name] = results.at(next++);
  for (const Param& p : table.params()) {
    const HostArray& g = results.at(next++);
    if (p.trainable) put_gradient(p, g, run.grads);
  }
  for (const auto& name : input_grads) run.grads[name] = results.at(next++);
  return run;
}

Distance distance(const HostArrays& got, const HostArrays& want) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double largest = 0;
  for (const auto& [name, w] : want) largest = std::max(largest, norm(w.to_doubles()));
  for (const auto& [name, g] : got)
    if (!want.contains(name)) return {kInfinity, name + " (not expected)", kInfinity};
  Distance worst;
  double differences = 0, squares = 0;
  for (const auto& [name, w] : want) {
    auto it = got.find(name);
    if (it == got.end()) return {kInfinity, name + " (absent)", kInfinity};
    if (it->second.dims() != w.dims())
      return {kInfinity, name + " " + to_string(it->second.shape()) + ", expected " + to_string(w.shape()), kInfinity};
    std::vector<double> a = it->second.to_doubles(), b = w.to_doubles();
    const double n = norm(b);
    for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
    const double d = norm(a) / (n > 1e-6 * largest ? n : largest);
    if (!(d <= worst.value)) worst = {std::isnan(d) ? kInfinity : d, name};
    differences += norm(a) * norm(a);
    squares += n * n;
  }
  worst.of_all = std::sqrt(differences / squares);
  return worst;
}

void PrintTo(const Variant& w, std::ostream* os) { *os << w.name; }

void expect_reference(const Variant& variant, const Forward& forward) {
  constexpr double kNoiseFloors = 10;
  const ModelCase c = load_case(variant.golden);
  const ModelRun run = run_case(c, forward, variant.options, variant.kernels);
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}; noise floor {:.2g}), gradients {:.2g} ({}; noise floor {:.2g})\n", out.value,
             out.name, c.noise_floor_outputs, grads.value, grads.name, c.noise_floor_gradients);
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "first at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

}  // namespace md
