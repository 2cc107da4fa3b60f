#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

// carry h [3], rows w [n, 3, 3] and stacked results; captured b is used twice.
Tensor recurrent(const std::vector<Tensor>& x, int64_t n, bool reverse, bool full_remat = false) {
  Tensor h0 = x[0], w = x[1], b = x[2];
  auto r = scan(
      n, {h0},
      [&](ScanStep& step, const std::vector<Tensor>& carry) {
        auto f = [](const std::vector<Tensor>& v) {
          return std::vector<Tensor>{tanh(dot(v[1], v[0], {.lhs_contract = {1}, .rhs_contract = {0}}) + v[2]) + v[0]};
        };
        std::vector<Tensor> in = {carry[0], step.slice(w), b};
        Tensor h = (full_remat ? checkpoint(remat_policy("FULL"), f, in) : f(in))[0];
        return ScanResult{{h * b}, {sin(h), square(carry[0]) * cast(step.index(), DType::f64)}};
      },
      reverse);
  return sum(square(r.carry[0])) + sum(r.stacked[0] * r.stacked[1]);
}

Tensor unrolled(const std::vector<Tensor>& x, int64_t n, bool reverse) {
  Tensor h = x[0], w = x[1], b = x[2], total;
  for (int64_t k = 0; k < n; ++k) {
    const int64_t i = reverse ? n - 1 - k : k;
    Tensor row = reshape(slice_axis(w, 0, i, i + 1), {3, 3});
    Tensor next = tanh(dot(row, h, {.lhs_contract = {1}, .rhs_contract = {0}}) + b) + h;
    Tensor part = sum(sin(next) * square(h) * static_cast<double>(i));
    total = total ? total + part : part;
    h = next * b;
  }
  return total + sum(square(h));
}

std::vector<Shape> shapes(int64_t n) { return {f64({3}), f64({n, 3, 3}), f64({3})}; }

class Direction : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Scan, Direction, testing::Bool());

TEST_P(Direction, EqualsTheUnrolledLoopWithGradients) {
  for (int64_t n : {1, 2, 5}) {
    auto a = with_gradients(shapes(n), [&](Graph&, auto& x) { return recurrent(x, n, GetParam()); }).run();
    auto b = with_gradients(shapes(n), [&](Graph&, auto& x) { return unrolled(x, n, GetParam()); }).run();
    for (size_t i = 0; i < a.size(); ++i)
      expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-13,
                   "length " + std::to_string(n) + ", value " + std::to_string(i));
  }
}

TEST_P(Direction, GradientEqualsFiniteDifferences) {
  check_gradients(shapes(4), [&](Graph&, auto& x) { return recurrent(x, 4, GetParam()); });
}

TEST_P(Direction, CheckpointInTheBodyGivesTheSameGradients) {
  auto a = with_gradients(shapes(4), [&](Graph&, auto& x) { return recurrent(x, 4, GetParam(), true); });
  auto b = with_gradients(shapes(4), [&](Graph&, auto& x) { return recurrent(x, 4, GetParam(), false); });
  EXPECT_EQ(count(a.text(), "stablehlo.tanh"), 2);
  EXPECT_EQ(count(b.text(), "stablehlo.tanh"), 1);
  auto va = a.run(), vb = b.run();
  for (size_t i = 0; i < va.size(); ++i)
    expect_close(va[i].to_doubles(), vb[i].to_doubles(), 1e-14, "value " + std::to_string(i));
}

TEST(Scan, CheckpointStoresOnlyTheInputsOfTheBody) {
  auto residuals = [](bool remat) {
    Graph g;
    std::vector<Tensor> x;
    for (const Shape& s : shapes(4)) x.push_back(g.input(std::to_string(x.size()), s));
    auto r = scan(4, {x[0]}, [&](ScanStep& step, const std::vector<Tensor>& carry) {
      auto f = [](const std::vector<Tensor>& v) {
        Tensor h = v[0];
        for (int i = 0; i < 4; ++i) h = sin(tanh(dot(v[1], h, {.lhs_contract = {1}, .rhs_contract = {0}})));
        return std::vector<Tensor>{h};
      };
      std::vector<Tensor> in = {carry[0], step.slice(x[1])};
      return ScanResult{remat ? checkpoint(remat_policy("FULL"), f, in) : f(in), {}};
    });
    grad(sum(r.carry[0]), {x[0], x[1]});
    return r.carry[0].node()->outputs.size() - 1;
  };
  EXPECT_EQ(residuals(true), 1u);
  EXPECT_GE(residuals(false), 8u);
}

TEST(Scan, GradientOfGradient) {
  check_gradients(shapes(3), [](Graph&, auto& x) {
    Tensor y = recurrent(x, 3, false);
    auto d = grad(y, {x[0], x[1], x[2]});
    return sum(square(d[0])) + sum(sin(d[1])) + sum(d[2] * x[2]);
  });
}

TEST(Scan, GradientOfGradientUnderCheckpoint) {
  check_gradients(shapes(3), [](Graph&, auto& x) {
    Tensor y = recurrent(x, 3, true, true);
    auto d = grad(y, {x[0], x[1], x[2]});
    return sum(square(d[0])) + sum(sin(d[1])) + sum(d[2] * x[2]);
  });
}

// The inner loop reads rows of a value of which the outer loop reads rows, and captures from two levels.
Tensor nested(const std::vector<Tensor>& x, bool remat_outer, bool remat_inner) {
  auto r = scan(2, {x[0]}, [&](ScanStep& outer, const std::vector<Tensor>& carry) {
    Tensor ws = outer.slice(x[1]);  // [3, 3]
    auto body = [&](const std::vector<Tensor>& v) {
      auto inner = scan(3, {v[0]}, [&](ScanStep& step, const std::vector<Tensor>& c) {
        auto g = [](const std::vector<Tensor>& u) {
          return std::vector<Tensor>{tanh(u[0] * u[1] + u[2]), u[0] * u[2]};
        };
        std::vector<Tensor> in = {c[0], step.slice(v[1]), x[2]};
        auto y = remat_inner ? checkpoint(remat_policy("FULL"), g, in) : g(in);
        return ScanResult{{y[0] + v[0]}, {y[1]}};
      });
      return std::vector<Tensor>{inner.carry[0] * sum(inner.stacked[0]) + x[2]};
    };
    return ScanResult{remat_outer ? checkpoint(remat_policy("FULL"), body, {carry[0], ws}) : body({carry[0], ws}), {}};
  });
  return sum(square(r.carry[0]));
}

TEST(Scan, InsideAScan) {
  const std::vector<Shape> s = {f64({3}), f64({2, 3, 3}), f64({3})};
  for (bool outer : {false, true})
    for (bool inner : {false, true}) {
      SCOPED_TRACE(testing::Message() << "remat outer " << outer << " inner " << inner);
      check_gradients(s, [&](Graph&, auto& x) { return nested(x, outer, inner); });
    }
}

TEST(Scan, InsideAScanGradientOfGradient) {
  check_gradients({f64({3}), f64({2, 3, 3}), f64({3})}, [&](Graph&, auto& x) {
    auto d = grad(nested(x, false, true), {x[0], x[1], x[2]});
    return sum(square(d[0])) + sum(sin(d[1])) + sum(d[2]);
  });
}

TEST(Scan, GradientTakenInsideTheBody) {
  check_gradients({f64({3}), f64({3})}, [](Graph&, auto& x) {
    auto r = scan(3, {x[0]}, [&](ScanStep&, const std::vector<Tensor>& c) {
      Tensor energy = sum(square(tanh(c[0] * x[1])));
      return ScanResult{{c[0] - 0.3 * grad(energy, {c[0]})[0]}, {}};
    });
    return sum(r.carry[0]);
  });
}

TEST(Scan, IntegerCarryHasNoCotangent) {
  check_gradients({f64({3})}, [](Graph& g, auto& x) {
    auto r = scan(3, {x[0], constant(g, 1, DType::s32)}, [](ScanStep&, const std::vector<Tensor>& c) {
      return ScanResult{{sin(c[0]) * cast(c[1], DType::f64), c[1] + c[1]}, {}};
    });
    return sum(r.carry[0]) * cast(r.carry[1], DType::f64);
  });
}

TEST(Scan, CarryThatOnlyLaterMatters) {  // the second carry reaches the loss through the first, one iteration later
  check_gradients({f64({2}), f64({2}), f64({2})}, [](Graph&, auto& x) {
    auto r = scan(3, {x[0], x[1], x[2]}, [](ScanStep&, const std::vector<Tensor>& c) {
      return ScanResult{{c[0] + sin(c[1]), c[2] * c[1], c[2]}, {}};
    });
    return sum(square(r.carry[0]));
  });
}

TEST(Scan, CapturedValueAndItsRows) {  // the same array captured whole, sliced by row, and in the initial carry
  check_gradients({f64({3, 3})}, [](Graph&, auto& x) {
    auto r = scan(3, {sum(x[0], {0})}, [&](ScanStep& step, const std::vector<Tensor>& c) {
      Tensor row = step.slice(x[0]);
      EXPECT_EQ(row, step.slice(x[0]));
      return ScanResult{{tanh(c[0] * row + sum(x[0], {1}))}, {row, x[0]}};
    });
    return sum(r.carry[0]) + sum(square(r.stacked[0])) + sum(sin(r.stacked[1]));
  });
}

TEST(Scan, RefusesACarryThatChangesShape) {
  Graph g;
  Tensor x = g.input("x", f64({3}));
  auto body = [](ScanStep&, const std::vector<Tensor>& c) { return ScanResult{{sum(c[0])}, {}}; };
  try {
    scan(3, {x}, body);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("f64[3]"), std::string::npos) << e.what();
  }
  EXPECT_THROW(scan(0, {x}, body), Error);
  EXPECT_THROW(scan(3, {}, body), Error);
  EXPECT_THROW(scan(4, {x}, [&](ScanStep& s, auto& c) { return ScanResult{{c[0] + s.slice(x)}, {}}; }), Error);
}

TEST(RunIf, HasTheValuesOfTheBranchThatRuns) {
  for (const double threshold : {0.0, 1e3}) {
    Traced p{{f64({3, 3}), f64({3, 3})}, [&](Graph&, const std::vector<Tensor>& x) {
               const Tensor runs = gt(sum(abs(x[0])), constant(x[0].graph(), threshold, DType::f64));
               return run_if(runs, x, {x[1], x[0]}, [](const std::vector<Tensor>& in) {
                 return std::vector<Tensor>{matmul(in[0], in[1]), in[1] * 2.0};
               });
             }};
    const auto in = p.inputs(), out = p.run();
    const std::vector<double> a = in[0].to_doubles(), b = in[1].to_doubles();
    for (size_t i = 0; i < 9; ++i) {
      double product = 0;
      for (size_t k = 0; k < 3; ++k) product += a[i / 3 * 3 + k] * b[3 * k + i % 3];
      EXPECT_NEAR(out[0].to_doubles()[i], threshold > 0 ? b[i] : product, 1e-12);
      EXPECT_EQ(out[1].to_doubles()[i], threshold > 0 ? a[i] : 2 * b[i]);
    }
  }
}

TEST(RunIf, ComputesTheBodyInItsBranch) {
  Graph g;
  const Tensor x = g.input("x", f64({3, 3}));
  g.output("y", run_if(gt(sum(x), constant(g, 0, DType::f64)), {x}, {x},
                       [](const std::vector<Tensor>& in) { return std::vector<Tensor>{matmul(in[0], in[0])}; })[0]);
  const std::string text = to_stablehlo(g);
  const size_t branches = text.find("stablehlo.case"), product = text.find("stablehlo.dot_general");
  ASSERT_NE(branches, text.npos) << text;
  EXPECT_GT(product, branches) << text;
  EXPECT_LT(product, text.find("-> (tensor<3x3xf64>)", branches)) << text;
}

TEST(RunIf, RefusesBranchesOfOtherShapes) {
  Graph g;
  const Tensor x = g.input("x", f64({3}));
  const auto body = [](const std::vector<Tensor>& in) { return std::vector<Tensor>{slice_axis(in[0], 0, 0, 2)}; };
  const Tensor runs = gt(sum(x), constant(g, 0, DType::f64));
  EXPECT_THROW(run_if(runs, {x}, {x}, body), Error);
  EXPECT_THROW(run_if(runs, {x}, {}, body), Error);
  EXPECT_THROW(run_if(x, {x}, {x}, body), Error);
}

TEST(RunIf, HasNoGradient) {
  Graph g;
  Tensor x = g.input("x", f64({}));
  auto y = run_if(lt(x, scalar_like(x, 9)), {x}, {x},
                  [](const std::vector<Tensor>& in) { return std::vector<Tensor>{in[0] * 3.0}; });
  EXPECT_THROW(grad(y[0], {x}), Error);
}

}  // namespace
}  // namespace md
