// Group and layer norm with their gradients: the CPU kernels, and the statements for other devices, compared with the
// same formula in f64 and its autodiff gradient.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

struct Case {
  Dims x;
  int64_t groups;  // 0: layer norm
  double eps = 1e-5, mean = 0;
  const char* act = "";
  DType type = DType::f32;
};
std::string text(const Case& c) {
  return fmt::format("{} groups {} eps {} mean {} {}", to_string(Shape{c.type, c.x}), c.groups, c.eps, c.mean, c.act);
}

/// x, weight, bias, dy.
std::vector<HostArray> inputs(const Case& c) {
  const Shape channels{DType::f32, {c.x.back()}};
  return {normal({c.type, c.x}, 1, 1, c.mean), normal(channels, 2, 1, 0.5), normal(channels, 3),
          normal({c.type, c.x}, 4)};
}

/// y, dx, dw, db of the layer as models call it.
std::vector<HostArray> layer(const Case& c, bool kernel) {
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels.callable = kernel;
  Graph g(options);
  ParamTable table;
  const auto in = inputs(c);
  Tensor x = g.input("x", in[0].shape()), dy = g.input("dy", in[3].shape());
  const Scope s(g, table, "m");
  Tensor y = c.groups ? nn::group_norm(s, x, c.groups, c.eps, c.act) : nn::layer_norm(s, x, c.eps);
  std::vector<Tensor> expected = {x};
  for (const Param& p : table.params()) expected.push_back(p.value);
  g.output("y", y);
  for (Tensor d : vjp({y}, {dy}, expected)) g.output("d" + std::to_string(g.outputs().size()), d);
  EXPECT_EQ(to_stablehlo(g).find("_norm_grad") != std::string::npos, kernel);
  return evaluate(one_device(), g, {in[0], in[3], in[1], in[2]});
}

std::vector<HostArray> expected(const Case& c) {
  std::vector<HostArray> in;
  for (const HostArray& a : inputs(c)) in.push_back(a.cast(DType::f64));
  auto formula = [&](const std::vector<Tensor>& xs) {
    Tensor v = xs[0];
    Axes over = {v.rank() - 1};
    if (c.groups) {
      const int64_t batch = v.dim(0), width = v.dim(-1) / c.groups;
      v = reshape(v, {batch, v.shape().elements() / batch / v.dim(-1), c.groups, width});
      over = {1, 3};
    }
    Tensor d = v - mean(v, over, true);
    Tensor y = reshape(d * rsqrt(mean(square(d), over, true) + c.eps), c.x) * xs[1] + xs[2];
    return std::vector{*c.act ? nn::activation(c.act, y) : y};
  };
  return outputs_and_gradients(formula, {in[0], in[1], in[2]}, {in[3]}, {});
}

const std::vector<Case>& cases() {
  static const std::vector<Case> list = {
      {{2, 8, 8, 32}, 8},
      {{2, 8, 8, 32}, 8, 1e-5, 0, "silu"},
      {{5, 7, 3, 21}, 7, 1e-6, 0, "swish"},    // odd sizes
      {{1, 3, 3, 12}, 1, 1e-5, 0, "silu"},     // one group
      {{3, 4, 4, 12}, 12, 1e-5, 0, "silu"},    // one group per channel
      {{2, 1, 1, 64}, 4, 1e-5, 0, "silu"},     // one pixel
      {{4, 64}, 4},                            // no spatial axis
      {{2, 9, 24}, 3, 1e-5, 0, "silu"},        // one spatial axis
      {{2, 8, 8, 32}, 8, 1e-5, 300, "silu"},   // mean much larger than the deviation
      {{2, 8, 8, 32}, 8, 2, 0, "silu"},        // large eps
      {{2, 8, 8, 32}, 8, 1e-5, 0, "gelu"},     // not fused
      {{2, 48, 48, 64}, 32, 1e-5, 1, "silu"},  // several chunks
      {{1, 96, 96, 6}, 3, 1e-5, 1, "silu"},    // many short rows in a chunk
      {{2, 8, 8, 32}, 8, 1e-5, 0, "silu", DType::bf16},
      {{5, 40, 40, 30}, 10, 1e-5, 0, "", DType::bf16},
      {{2, 7, 32}, 0},
      {{1, 13}, 0, 1e-6},
      {{70, 3}, 0},
      {{3, 100, 21}, 0, 1e-5, 300},
      {{4, 300, 320}, 0, 2},
      {{33, 77}, 0, 1e-5, 0, "", DType::bf16},
  };
  return list;
}

TEST(Norms, KernelsAndStatementsMatchTheFormulaInF64) {
  const char* names[] = {"y", "dx", "dw", "db"};
  for (const Case& c : cases()) {
    const auto want = expected(c), kernel = layer(c, true), statements = layer(c, false);
    for (size_t i = 0; i < want.size(); ++i) {
      const std::string what = text(c) + " " + names[i];
      ASSERT_EQ(kernel[i].shape(), statements[i].shape()) << what;
      const double off = relative_error(kernel[i], want[i]), other = relative_error(statements[i], want[i]);
      // With mean 300, f32 represents the signal to 1e-5 of its deviation.
      EXPECT_LT(off, c.type == DType::bf16 ? 4e-3 : c.mean > 100 ? 4e-5 : 1e-6) << what;
      EXPECT_LT(off, 1.5 * other + 5e-7) << what;
    }
  }
}

TEST(Norms, KernelsGiveTheSameBitsAgain) {
  for (const Case& c : {Case{{3, 64, 64, 96}, 32, 1e-5, 0, "silu"}, Case{{2, 4096, 64}, 0}}) {
    const auto once = layer(c, true);
    for (int again = 0; again < 3; ++again) {
      const auto next = layer(c, true);
      for (size_t i = 0; i < once.size(); ++i) EXPECT_EQ(next[i].to_doubles(), once[i].to_doubles()) << text(c);
    }
  }
}

}  // namespace
}  // namespace md
