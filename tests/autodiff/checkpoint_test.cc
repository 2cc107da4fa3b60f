#include "maxdiffusion/ops/custom_vjp.h"
#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

std::vector<Tensor> block(const std::vector<Tensor>& v) {
  return {v[0] + 0.3 * matmul(tanh(matmul(v[0], v[1])), v[2])};
}

Loss chain(int depth, const RematPolicy& policy) {
  return [=](Graph&, const std::vector<Tensor>& x) {
    Tensor h = x[0];
    for (int i = 0; i < depth; ++i) h = checkpoint(policy, block, {h, x[1], x[2]})[0];
    return mean(square(h));
  };
}

const std::vector<Shape> kSmall = {f32({8, 16}), f32({16, 16}), f32({16, 16})};

TEST(Checkpoint, GivesTheSameValuesAndGradients) {
  auto a = with_gradients(kSmall, chain(4, remat_policy("FULL"))).run();
  auto b = with_gradients(kSmall, chain(4, remat_policy("NONE"))).run();
  for (size_t i = 0; i < a.size(); ++i)
    expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-6, "output " + std::to_string(i));
  EXPECT_EQ(a[0].to_doubles(), b[0].to_doubles());  // the forward pass is the same program
}

TEST(Checkpoint, RegionIsRecomputedBehindOneBarrier) {
  const std::string full = with_gradients(kSmall, chain(4, remat_policy("FULL"))).text();
  const std::string none = with_gradients(kSmall, chain(4, remat_policy("NONE"))).text();
  EXPECT_EQ(count(full, "stablehlo.tanh"), 8);
  EXPECT_EQ(count(none, "stablehlo.tanh"), 4);
  EXPECT_EQ(count(full, "stablehlo.optimization_barrier"), 4);
  // Two dots forward, one recomputed (the second one's result is not needed), four backward; none dead.
  EXPECT_EQ(count(full, "stablehlo.dot_general"), 4 * 7);
  EXPECT_EQ(count(none, "stablehlo.dot_general"), 4 * 6);
}

// S0-63
TEST(Checkpoint, LowersThePeakOfADeepChain) {
  const std::vector<Shape> shapes = {f32({1024, 64}), f32({64, 256}), f32({256, 64})};
  auto temporary = [&](const RematPolicy& policy) {
    Graph g;
    with_gradients(shapes, chain(24, policy)).trace(g);
    return compile(devices(), g, {.jax_cache_dir = "off"}, "deep_chain").memory()->temporary;
  };
  const int64_t full = temporary(remat_policy("FULL")), none = temporary({});
  RecordProperty("temporary_full", std::to_string(full));
  RecordProperty("temporary_none", std::to_string(none));
  EXPECT_LT(full, none / 2) << "bytes: FULL " << full << ", NONE " << none;
}

TEST(Checkpoint, APolicyKeepsWhatItNames) {
  const RematPolicy dots = [](const Node& n) { return n.op->is_dot ? Keep::keep : Keep::recompute; };
  const std::string text = with_gradients(kSmall, chain(4, dots)).text();
  EXPECT_EQ(count(text, "stablehlo.dot_general"), 4 * 6);
  EXPECT_EQ(count(text, "stablehlo.tanh"), 8);
  auto a = with_gradients(kSmall, chain(4, dots)).run(), b = with_gradients(kSmall, chain(4, {})).run();
  for (size_t i = 0; i < a.size(); ++i)
    expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-6, "output " + std::to_string(i));
}

// S0-64…67, S0-69, S2-38…42
TEST(Checkpoint, NamedPoliciesKeepWhatTheySay) {
  // Two linear products and one with a batch axis; the first tanh is named.
  auto named_chain = [](const RematPolicy& policy) -> Loss {
    return [=](Graph&, const std::vector<Tensor>& x) {
      Tensor h = x[0];
      for (int i = 0; i < 2; ++i)
        h = checkpoint(
            policy,
            [](const std::vector<Tensor>& v) {
              auto linear = [](Tensor a, Tensor w) { return dot(a, w, {.lhs_contract = {2}, .rhs_contract = {0}}); };
              Tensor y = named(tanh(linear(v[0], v[1])), "query_proj");
              Tensor scores =
                  dot(sin(y), y, {.lhs_contract = {2}, .rhs_contract = {2}, .lhs_batch = {0}, .rhs_batch = {0}});
              return std::vector<Tensor>{v[0] + 0.1 * exp(linear(sin(matmul(scores, y)), v[2]))};
            },
            {h, x[1], x[2]})[0];
      return mean(square(h));
    };
  };
  const std::vector<Shape> shapes = {f32({2, 4, 8}), f32({8, 8}), f32({8, 8})};
  const auto expected = with_gradients(shapes, named_chain({})).run();
  struct Case {
    const char* name;
    RematNames names;
    int dots, tanhs;  // in addition to those without recomputation
  };
  for (const Case& c : {Case{"NONE", {}, 0, 0}, Case{"FULL", {}, 8, 2}, Case{"MATMUL_WITHOUT_BATCH", {}, 4, 2},
                        Case{"OFFLOAD_MATMUL_WITHOUT_BATCH", {}, 4, 2},
                        Case{"CUSTOM", {.saved = {"query_proj"}, .offloaded = {}}, 6, 0},
                        Case{"CUSTOM", {.saved = {}, .offloaded = {"query_proj"}}, 6, 0},
                        Case{"CUSTOM", {.saved = {"key_proj"}, .offloaded = {"value_proj"}}, 8, 2},
                        Case{"HIDDEN_STATE_WITH_OFFLOAD", {}, 8, 2}}) {
    const auto traced = with_gradients(shapes, named_chain(remat_policy(c.name, c.names)));
    const std::string text = traced.text(), none = with_gradients(shapes, named_chain({})).text();
    EXPECT_EQ(count(text, "stablehlo.dot_general") - count(none, "stablehlo.dot_general"), c.dots) << c.name;
    EXPECT_EQ(count(text, "stablehlo.tanh") - count(none, "stablehlo.tanh"), c.tanhs) << c.name;
    const auto found = traced.run();
    for (size_t i = 0; i < expected.size(); ++i)
      expect_close(found[i].to_doubles(), expected[i].to_doubles(), 1e-5, c.name + (" " + std::to_string(i)));
  }
}

TEST(Checkpoint, NameAppliesToAllResultsOfAnOperation) {
  // Two names on a reshaped result of a function with a custom gradient that also reads its other result.
  auto loss = [](const RematPolicy& policy) -> Loss {
    return [=](Graph&, const std::vector<Tensor>& x) {
      return sum(checkpoint(
          policy,
          [](const std::vector<Tensor>& v) {
            const std::vector<Tensor> ys = custom_vjp(
                {v[0]},
                [](const std::vector<Tensor>& in) {
                  return std::vector{tanh(in[0]), exp(in[0])};
                },
                [](const std::vector<Tensor>&, const std::vector<Tensor>& out, const Grads& dys) -> Grads {
                  return {dys[0] * out[1] * out[0]};
                });
            Tensor y = named(named(reshape(ys[0], {6}), "self_attn"), "attn_output");
            return std::vector<Tensor>{sin(reshape(y, {3, 2}))};
          },
          x)[0]);
    };
  };
  const std::vector<Shape> shapes = {f64({2, 3})};
  const auto expected = with_gradients(shapes, loss({})).run();
  for (const RematNames& names : {RematNames{{"self_attn"}, {}}, RematNames{{"attn_output"}, {}},
                                  RematNames{{}, {"attn_output"}}, RematNames{{"self_attn"}, {"attn_output"}}}) {
    const auto traced = with_gradients(shapes, loss(remat_policy("CUSTOM", names)));
    EXPECT_EQ(count(traced.text(), "stablehlo.tanh"), 1);
    EXPECT_EQ(count(traced.text(), "stablehlo.exponential"), 1);
    EXPECT_EQ(traced.run()[1].to_doubles(), expected[1].to_doubles());
    Graph tpu(GraphOptions{.platform = Platform::tpu});
    traced.trace(tpu);  // both results are offloaded, unless a name saves them
    EXPECT_EQ(count(to_stablehlo(tpu), "annotate_device_placement"), names.saved.empty() ? 4 : 0);
  }
  EXPECT_EQ(count(with_gradients(shapes, loss(remat_policy("FULL"))).text(), "stablehlo.exponential"), 2);
}

TEST(Checkpoint, OffloadsOnceAndLoadsForEachUse) {
  Graph g(GraphOptions{.platform = Platform::tpu});
  with_gradients(kSmall, [](Graph& graph, const std::vector<Tensor>& x) {
    return chain(3, remat_policy("OFFLOAD_MATMUL_WITHOUT_BATCH"))(graph, x);
  }).trace(g);
  const std::string text = to_stablehlo(g);
  // The backward pass reads only the first of a block's two products.
  EXPECT_EQ(count(text, "_xla_buffer_placement = \"pinned_host\""), 3);
  EXPECT_EQ(count(text, "_xla_buffer_placement = \"device\""), 3);
  EXPECT_EQ(count(text, "stablehlo.tanh"), 6);
  // A CPU's memory is the host's.
  EXPECT_EQ(count(with_gradients(kSmall, chain(3, remat_policy("OFFLOAD_MATMUL_WITHOUT_BATCH"))).text(), "annotate"),
            0);
}

TEST(Checkpoint, RegionsNest) {
  const RematPolicy full = remat_policy("FULL");
  auto loss = [&](const RematPolicy& outer, const RematPolicy& inner) -> Loss {
    return [=](Graph&, const std::vector<Tensor>& x) {
      Tensor y = checkpoint(
          outer,
          [&](const std::vector<Tensor>& v) {
            Tensor h = sin(v[0]);
            for (int i = 0; i < 2; ++i) h = exp(checkpoint(inner, block, {h, v[1], v[2]})[0] * 0.1);
            return std::vector<Tensor>{h};
          },
          x)[0];
      return sum(square(y));
    };
  };
  const std::vector<Shape> shapes = {f64({2, 3}), f64({3, 3}), f64({3, 3})};
  for (const RematPolicy& outer : {RematPolicy(), full})
    for (const RematPolicy& inner : {RematPolicy(), full}) check_gradients(shapes, loss(outer, inner));
  // Forward 2, recomputed with the outer region 2, and with each inner region 2.
  EXPECT_EQ(count(with_gradients(shapes, loss(full, full)).text(), "stablehlo.tanh"), 6);
  EXPECT_EQ(count(with_gradients(shapes, loss(full, {})).text(), "stablehlo.tanh"), 4);
}

TEST(Checkpoint, AroundAScan) {
  auto loss = [](const RematPolicy& policy) -> Loss {
    return [=](Graph&, const std::vector<Tensor>& x) {
      return sum(square(checkpoint(
          policy,
          [](const std::vector<Tensor>& v) {
            auto r = scan(3, {v[0]}, [&](ScanStep& step, const std::vector<Tensor>& c) {
              return ScanResult{{tanh(c[0] * v[1]) + step.slice(v[2])}, {sin(c[0])}};
            });
            return std::vector<Tensor>{r.carry[0] * sum(r.stacked[0], {0})};
          },
          x)[0]));
    };
  };
  const std::vector<Shape> shapes = {f64({3}), f64({3}), f64({3, 3})};
  check_gradients(shapes, loss(remat_policy("FULL")));
  EXPECT_EQ(count(with_gradients(shapes, loss(remat_policy("FULL"))).text(), "stablehlo.while"), 3);
  EXPECT_EQ(count(with_gradients(shapes, loss({})).text(), "stablehlo.while"), 2);
}

TEST(Checkpoint, TakesEveryElementType) {
  auto loss = [](const RematPolicy& policy) -> Loss {
    return [=](Graph&, const std::vector<Tensor>& x) {
      Tensor h = cast(x[0], DType::bf16), w = cast(x[1], DType::bf16);
      Tensor mask = gt(x[0], scalar_like(x[0], 0));
      for (int i = 0; i < 3; ++i)
        h = checkpoint(policy,
                       [](const std::vector<Tensor>& v) {
                         Tensor y = tanh(matmul(v[0], v[1])) +
                                    cast(cast(v[3], DType::f16) * cast(v[0], DType::f16), DType::bf16);
                         return std::vector<Tensor>{where(v[2], y, v[0])};
                       },
                       {h, w, mask, x[2]})[0];
      return sum(square(cast(h, DType::f32)));
    };
  };
  const std::vector<Shape> shapes = {f32({8, 8}), f32({8, 8}), {DType::s32, {8, 8}}};
  auto a = with_gradients(shapes, loss(remat_policy("FULL"))).run(), b = with_gradients(shapes, loss({})).run();
  for (size_t i = 0; i < a.size(); ++i)
    expect_close(a[i].to_doubles(), b[i].to_doubles(), 2e-2, "output " + std::to_string(i));
}

TEST(Checkpoint, SecondDerivative) {
  check_gradients({f64({2, 3}), f64({3, 3}), f64({3, 3})}, [](Graph& g, const std::vector<Tensor>& x) {
    Tensor y = chain(2, remat_policy("FULL"))(g, x);
    auto d = grad(y, x);
    return sum(square(d[0])) + sum(sin(d[1]));
  });
}

// S0-64, S0-65
TEST(Checkpoint, KnowsItsPoliciesByName) {
  EXPECT_FALSE(remat_policy("None"));
  EXPECT_TRUE(remat_policy("full"));
  try {
    remat_policy("EVERYTHING");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(e.message().find("NONE, FULL"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace md
