// Gradient checks: run programs on the real plugin and compare with finite differences in f64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md::gradient_check {

inline const Devices& devices() { return one_device(); }

inline HostArray wave(const Shape& shape, double phase) {
  HostArray a(Shape{DType::f64, shape.dims});
  auto v = a.mutable_view<double>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = 0.9 * std::sin(1.7 * static_cast<double>(i) + phase);
  return a.cast(shape.dtype);
}

/// A program of named inputs "0", "1", … .
struct Traced {
  std::vector<Shape> shapes;
  std::function<std::vector<Tensor>(Graph&, const std::vector<Tensor>&)> build;

  std::vector<HostArray> inputs() const {
    std::vector<HostArray> in;
    for (size_t i = 0; i < shapes.size(); ++i) in.push_back(wave(shapes[i], 0.3 + static_cast<double>(i)));
    return in;
  }
  void trace(Graph& g) const {
    std::vector<Tensor> xs;
    for (size_t i = 0; i < shapes.size(); ++i) xs.push_back(g.input(std::to_string(i), shapes[i]));
    size_t k = 0;
    for (Tensor t : build(g, xs)) g.output("out" + std::to_string(k++), t);
  }
  std::vector<HostArray> run(const std::vector<HostArray>& in) const {
    Graph g;
    trace(g);
    return evaluate(devices(), g, in);
  }
  std::vector<HostArray> run() const { return run(inputs()); }
  std::string text() const {
    Graph g;
    trace(g);
    return to_stablehlo(g);
  }
};

using Loss = std::function<Tensor(Graph&, const std::vector<Tensor>&)>;

/// The loss and its gradients (zeros where absent) as one program.
inline Traced with_gradients(std::vector<Shape> shapes, const Loss& loss) {
  return {std::move(shapes), [loss](Graph& g, const std::vector<Tensor>& xs) {
            Tensor y = loss(g, xs);
            std::vector<Tensor> out = {y}, expected;
            for (Tensor x : xs)
              if (is_float(x.dtype())) expected.push_back(x);
            auto grads = grad(y, expected);
            for (size_t i = 0; i < grads.size(); ++i) out.push_back(grads[i] ? grads[i] : zeros_like(expected[i]));
            return out;
          }};
}

inline void expect_close(const std::vector<double>& a, const std::vector<double>& b, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  double scale = 1e-3;
  for (double v : b) scale = std::max(scale, std::abs(v));
  for (size_t i = 0; i < a.size(); ++i)
    ASSERT_NEAR(a[i], b[i], tolerance * scale) << what << ", element " << i << " of " << a.size();
}

/// Gradients of an f64 loss against central differences.
inline void check_gradients(const std::vector<Shape>& shapes, const Loss& loss) {
  const Traced value{shapes, [&](Graph& g, const std::vector<Tensor>& xs) { return std::vector<Tensor>{loss(g, xs)}; }};
  const Traced full = with_gradients(shapes, loss);
  const std::vector<HostArray> in = full.inputs();
  const std::vector<HostArray> out = full.run(in);
  Graph g;
  value.trace(g);
  const double step = 1e-5;
  const auto program = compile(devices(), g, {.jax_cache_dir = "off"}, "finite_differences");
  auto at = [&](size_t k, size_t i, double delta) {
    std::vector<Array> arrays;
    std::vector<Array*> pointers;
    for (size_t j = 0; j < in.size(); ++j) {
      HostArray copy = in[j];
      if (j == k) {
        HostArray moved(in[j].shape());
        auto to = moved.mutable_view<double>();
        auto from = in[j].view<double>();
        std::copy(from.begin(), from.end(), to.begin());
        to[i] += delta;
        copy = moved;
      }
      arrays.push_back(devices().put(copy));
    }
    for (Array& a : arrays) pointers.push_back(&a);
    return devices().get(program.run(pointers)[0]).to_doubles()[0];
  };
  size_t output = 1;
  for (size_t k = 0; k < in.size(); ++k) {
    if (!is_float(shapes[k].dtype)) continue;
    std::vector<double> expected;
    for (size_t i = 0; i < static_cast<size_t>(shapes[k].elements()); ++i)
      expected.push_back((at(k, i, step) - at(k, i, -step)) / (2 * step));
    expect_close(out[output++].to_doubles(), expected, 2e-8, "gradient of input " + std::to_string(k));
  }
}

inline int count(const std::string& text, const std::string& word) {
  int n = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + word.size())) ++n;
  return n;
}

inline Shape f64(Dims dims) { return {DType::f64, std::move(dims)}; }
inline Shape f32(Dims dims) { return {DType::f32, std::move(dims)}; }

}  // namespace md::gradient_check
