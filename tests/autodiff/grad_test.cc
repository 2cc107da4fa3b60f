#include "maxdiffusion/ops/custom_vjp.h"
#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

TEST(Grad, SecondUseAccumulates) {
  check_gradients({f64({3}), f64({3})}, [](Graph&, const std::vector<Tensor>& x) {
    Tensor a = tanh(x[0] * x[1]);
    return sum(a * x[0] + a * a * x[1]);
  });
}

TEST(Grad, OfAnIntermediateValue) {
  Traced p{{f64({4})}, [](Graph&, const std::vector<Tensor>& x) {
             Tensor y = square(x[0]);
             Tensor z = sum(sin(y));
             auto g = grad(z, {y, x[0]});
             return std::vector<Tensor>{g[0], cos(y), g[1], 2.0 * x[0] * cos(y)};
           }};
  auto out = p.run();
  expect_close(out[0].to_doubles(), out[1].to_doubles(), 1e-15, "d/dy");
  expect_close(out[2].to_doubles(), out[3].to_doubles(), 1e-15, "d/dx");
}

TEST(Grad, OfAGradient) {
  check_gradients({f64({3})}, [](Graph&, const std::vector<Tensor>& x) {
    Tensor y = sum(exp(x[0]) * sin(x[0]));
    Tensor d = grad(y, {x[0]})[0];
    return sum(square(d) + grad(sum(tanh(d)), {x[0]})[0]);
  });
}

TEST(Grad, AbsentCotangentsCostNothing) {
  Graph g;
  Tensor x = g.input("x", f64({3})), y = g.input("y", f64({3}));
  Tensor i = g.input("i", {DType::s32, {3}});
  Tensor loss = sum(tanh(x) + exp(stop_gradient(y)) + cast(i, DType::f64));
  const size_t before = g.nodes().size();
  auto d = grad(loss, {x, y, i});
  EXPECT_TRUE(d[0]);
  EXPECT_FALSE(d[1]);
  EXPECT_FALSE(d[2]);
  for (size_t k = before; k < g.nodes().size(); ++k) EXPECT_STRNE(g.nodes()[k]->op->name, "exp");
}

TEST(Grad, BackwardNodesCarryThePathOfTheForwardNode) {
  Graph g;
  Tensor x = g.input("x", f64({3}));
  Tensor y;
  {
    PathScope scope(g, "down.1");
    y = tanh(x);
  }
  Tensor loss = sum(y);
  const size_t before = g.nodes().size();
  g.output("d", grad(loss, {x})[0]);
  bool seen = false;
  for (size_t k = before; k < g.nodes().size(); ++k) seen |= g.nodes()[k]->backward && *g.nodes()[k]->path == "down.1";
  EXPECT_TRUE(seen);
  EXPECT_EQ(g.path(), "");
  EXPECT_GT(count(to_stablehlo(g), "down.1/multiply (grad)"), 0);
}

TEST(Grad, NamesAnOpWithoutARule) {
  const OpDef kOpaque = {.name = "opaque",
                         .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
                         .emit = [](EmitCtx& c) { c.set_out(c.in()); }};
  Graph g;
  Tensor x = g.input("x", f64({}));
  PathScope scope(g, "mid.attn");
  Tensor y = apply(kOpaque, {x});
  try {
    grad(y, {x});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_graph);
    EXPECT_NE(e.message().find("opaque"), std::string::npos) << e.what();
    EXPECT_NE(e.message().find("mid.attn"), std::string::npos) << e.what();
  }
}

TEST(Grad, NamesARuleThatReturnsTheWrongShape) {
  const OpDef kWrong = {.name = "wrong",
                        .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
                        .emit = [](EmitCtx& c) { c.set_out(c.in()); },
                        .vjp = [](const VjpCtx& c) -> Grads {
                          return {Tensor(), sum(c.dy())};
                        }};
  Graph g;
  Tensor x = g.input("x", f64({2})), y = g.input("y", f64({3}));
  Tensor z = sum(apply(kWrong, {x, y}));
  try {
    grad(z, {x, y});
    FAIL();
  } catch (const Error& e) {
    for (const char* word : {"wrong", "input 1", "f64[]", "f64[3]"})
      EXPECT_NE(e.message().find(word), std::string::npos) << e.what();
  }
}

TEST(Grad, NeedsAFloatingScalar) {
  Graph g;
  Tensor x = g.input("x", f64({2}));
  EXPECT_THROW(grad(x, {x}), Error);
  EXPECT_THROW(grad(cast(sum(x), DType::s32), {x}), Error);
}

TEST(CustomVjp, UsesTheGivenRuleAndOnlyIt) {
  Traced p{{f64({3})}, [](Graph&, const std::vector<Tensor>& x) {
             auto y = custom_vjp(
                 {x[0]},
                 [](const std::vector<Tensor>& v) {
                   return std::vector<Tensor>{exp(v[0]), sin(v[0])};
                 },
                 [](const std::vector<Tensor>& xs, const std::vector<Tensor>& ys, const Grads& dys) {
                   EXPECT_FALSE(dys[1]);
                   return Grads{dys[0] * ys[0] * 10.0 + xs[0]};
                 });
             Tensor loss = sum(y[0] * 2.0);
             return std::vector<Tensor>{grad(loss, {x[0]})[0], 20.0 * exp(x[0]) + x[0]};
           }};
  auto out = p.run();
  expect_close(out[0].to_doubles(), out[1].to_doubles(), 1e-14, "custom gradient");
}

TEST(CustomVjp, WorksTwiceInsideCheckpointAndLoops) {
  auto f = [](const std::vector<Tensor>& v) {
    return custom_vjp(
        v, [](const std::vector<Tensor>& x) { return std::vector<Tensor>{tanh(x[0]) * x[1]}; },
        [](const std::vector<Tensor>& x, const std::vector<Tensor>&, const Grads& dy) {
          Tensor t = tanh(x[0]);
          return Grads{dy[0] * (1.0 - t * t) * x[1], dy[0] * t};
        });
  };
  check_gradients({f64({3}), f64({3})}, [&](Graph&, const std::vector<Tensor>& x) {
    auto r = scan(3, {x[0]}, [&](ScanStep&, const std::vector<Tensor>& c) {
      return ScanResult{checkpoint(remat_policy("full"), f, {c[0], x[1]}), {}};
    });
    Tensor y = sum(square(r.carry[0]));
    return y + sum(square(grad(y, {x[0]})[0]));
  });
}

}  // namespace
}  // namespace md
