// Runs a small graph on the CPU plugin for tests: inputs in, doubles out.
#pragma once

#include <functional>
#include <vector>

#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md {

/// An array of this type from doubles, rounded.
inline HostArray array(DType type, const Dims& dims, const std::vector<double>& values) {
  return HostArray::of<double>({DType::f64, dims}, values).cast(type);
}

using Build = std::function<std::vector<Tensor>(Graph&, const std::vector<Tensor>&)>;

inline std::vector<HostArray> evaluate(const std::vector<HostArray>& inputs, const Build& build) {
  Graph g(one_device().graph_options());
  std::vector<Tensor> in;
  for (size_t i = 0; i < inputs.size(); ++i) in.push_back(g.input("x" + std::to_string(i), inputs[i].shape()));
  auto out = build(g, in);
  for (size_t i = 0; i < out.size(); ++i) g.output("y" + std::to_string(i), out[i]);
  return evaluate(one_device(), g, inputs);
}

}  // namespace md
