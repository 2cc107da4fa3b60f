// Kernels of maxdiffusion/kernels/ compared with the compiler's code in f64: outputs and gradients of a function.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/processor.h"
#include "tests/one_device.h"

namespace md {

using TensorFn = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

/// Number of occurrences of `what` in `text`.
inline size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

/// Whether bf16 products can run here, however slowly: oneDNN has none below AVX-512.
inline bool runs_bf16_products() { return processor().wide_vectors; }
/// The values of CpuKernels::bf16_products that run here.
inline std::vector<bool> ways_of_bf16() { return runs_bf16_products() ? std::vector{false, true} : std::vector{false}; }

/// Normally distributed values around `mean`; equal for equal seeds.
inline HostArray normal(const Shape& shape, unsigned seed, double scale = 1, double mean = 0) {
  HostArray a({DType::f32, shape.dims});
  std::mt19937 bits(seed);
  std::normal_distribution<float> gaussian(static_cast<float>(mean), static_cast<float>(scale));
  for (float& v : a.mutable_view<float>()) v = gaussian(bits);
  return a.cast(shape.dtype);
}

/// f(xs), then the gradients of xs for the gradients `dys` of the results.
inline std::vector<HostArray> outputs_and_gradients(const TensorFn& f, const std::vector<HostArray>& xs,
                                                    const std::vector<HostArray>& dys, CpuKernels kernels,
                                                    const std::vector<std::string>& calls = {}) {
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels = kernels;
  Graph graph(options);
  auto inputs = [&](const char* name, const std::vector<HostArray>& arrays) {
    std::vector<Tensor> tensors;
    for (const HostArray& a : arrays) tensors.push_back(graph.input(name + std::to_string(tensors.size()), a.shape()));
    return tensors;
  };
  const std::vector<Tensor> in = inputs("x", xs);
  std::vector<Tensor> out = f(in);
  for (Tensor dx : vjp(out, inputs("dy", dys), in)) out.push_back(dx);
  for (size_t i = 0; i < out.size(); ++i) graph.output("out" + std::to_string(i), out[i]);
  const std::string text = to_stablehlo(graph);
  for (const std::string& call : calls) EXPECT_NE(text.find('"' + call + '"'), std::string::npos) << call;
  std::vector<HostArray> feed = xs;
  feed.insert(feed.end(), dys.begin(), dys.end());
  return evaluate(one_device(), graph, feed);
}

/// max |a − b| / max |b|; infinite if `a` is not finite.
inline double relative_error(const HostArray& a, const HostArray& b) {
  const std::vector<double> x = a.to_doubles(), y = b.to_doubles();
  double difference = 0, largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference = std::max(difference, std::isfinite(x[i]) ? std::abs(x[i] - y[i]) : INFINITY);
    largest = std::max(largest, std::abs(y[i]));
  }
  return largest > 0 ? difference / largest : difference;
}

/// Expects that `f` calls the named kernels, which compute bf16 products directly or widened (`bf16_products`), that it
/// agrees within `tolerance` (relative to the largest element) with the same function in f64 without kernels, and that
/// a second run gives the same bits.
inline void expect_agreement(const TensorFn& f, const std::vector<HostArray>& xs, double tolerance,
                             const std::vector<std::string>& calls, bool bf16_products = false) {
  std::vector<HostArray> dys, wide_xs, wide_dys;
  {
    Graph graph;
    std::vector<Tensor> in;
    for (const HostArray& x : xs) in.push_back(graph.input("x" + std::to_string(in.size()), x.shape()));
    for (Tensor y : f(in)) dys.push_back(normal(y.shape(), 100 + static_cast<unsigned>(dys.size())));
  }
  for (const HostArray& x : xs) wide_xs.push_back(x.cast(DType::f64));
  for (const HostArray& dy : dys) wide_dys.push_back(dy.cast(DType::f64));
  const CpuKernels kernels{.callable = true, .f32_products = true, .bf16_products = bf16_products};
  const auto found = outputs_and_gradients(f, xs, dys, kernels, calls);
  const auto again = outputs_and_gradients(f, xs, dys, kernels, calls);
  const auto expected = outputs_and_gradients(f, wide_xs, wide_dys, {});
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LE(relative_error(found[i], expected[i]), tolerance)
        << (i < dys.size() ? "output " : "gradient ") << (i < dys.size() ? i : i - dys.size());
    EXPECT_TRUE(std::equal(found[i].data(), found[i].data() + found[i].bytes(), again[i].data())) << "not repeatable";
  }
}

}  // namespace md
