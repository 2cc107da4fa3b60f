// Tests the graph and its printer with operations defined here: names, paths, captures, donation, printed text.
#include "maxdiffusion/graph/graph.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"

namespace md {
namespace {

const OpDef kTwin = {
    .name = "twin",
    .infer =
        [](const InferCtx& c) {
          check(c.in[0] == c.in[1], Code::invalid_graph, "twin: {} and {} differ", to_string(c.in[0]),
                to_string(c.in[1]));
          return std::vector<Shape>{c.in[0]};
        },
    .emit = [](EmitCtx& c) { c.simple("test.twin"); },
};
const OpDef kNumber = {
    .name = "number",
    .infer =
        [](const InferCtx&) {
          return std::vector<Shape>{{DType::f32, {2}}};
        },
    .emit = [](EmitCtx& c) { c.set_out(c.constant(c.attrs<double>(), c.out())); },
    .cheap = true,
};
const OpDef kPair = {
    .name = "pair",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>{c.in[0], c.in[0]};
        },
    .emit =
        [](EmitCtx& c) {
          Shape s = c.out();
          std::string region = c.region({s}, [&](EmitCtx& r, const std::vector<Value>& a) {
            Value half = r.constant(0.5, s);
            return std::vector<Value>{r.emit("test.times", {a[0], half}, s)};
          });
          auto out = c.emit_multi("test.pair", {c.in()}, {s, s}, "how = 1 : i64", {region});
          c.set_out(out[0], 0);
          c.set_out(out[1], 1);
        },
};
const OpDef kForgetful = {
    .name = "forgetful",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          c.set_out(c.emit("test.other", {c.in()}, {DType::f32, {7}}));
        },
};

const Shape kVector{DType::f32, {2}};

std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

TEST(Graph, NamesOfInputsAndOutputsAreUnique) {
  Graph g;
  Tensor x = g.input("x", kVector);
  g.output("y", x);
  EXPECT_EQ(message_of([&] { g.input("x", kVector); }), "input 'x' exists already");
  EXPECT_EQ(message_of([&] { g.output("y", x); }), "output 'y' exists already");
  EXPECT_EQ(message_of([&] { g.output("z", {}); }), "output 'z' is absent");
  EXPECT_EQ(g.input_index("x"), 0);
  EXPECT_EQ(g.input_index("y"), -1);
}

TEST(Graph, ShapeErrorsCarryThePathOfTheirScope) {
  Graph g;
  Tensor a = g.input("a", kVector), b = g.input("b", {DType::f32, {3}});
  EXPECT_EQ(message_of([&] { apply(kTwin, {a, b}); }), "twin: f32[2] and f32[3] differ");
  PathScope outer(g, "unet");
  PathScope inner(g, "unet.mid_block");
  EXPECT_EQ(message_of([&] { apply(kTwin, {a, b}); }), "twin: f32[2] and f32[3] differ\n  at unet.mid_block");
  EXPECT_NE(message_of([&] { apply(kTwin, {a, {}}); }).find("twin: an input is absent"), std::string::npos);
}

TEST(Graph, PathScopesEndWhereTheyEnd) {
  Graph g;
  Tensor x = g.input("x", kVector);
  {
    PathScope scope(g, "block.0");
    EXPECT_EQ(*apply(kTwin, {x, x}).node()->path, "block.0");
  }
  EXPECT_EQ(*apply(kTwin, {x, x}).node()->path, "");
}

TEST(Graph, AliasWantsEqualShapes) {
  Graph g;
  Tensor x = g.input("x", kVector), w = g.input("w", {DType::f32, {3}});
  g.output("y", apply(kTwin, {x, x}));
  EXPECT_EQ(message_of([&] { g.alias("w", "y"); }), "alias 'w' f32[3] to 'y' f32[2]: shapes differ");
  EXPECT_EQ(message_of([&] { g.alias("v", "y"); }), "alias 'v' to 'y': no such input");
  EXPECT_EQ(message_of([&] { g.alias("x", "q"); }), "alias 'x' to 'q': no such output");
  g.alias("x", "y");
  EXPECT_EQ(count(to_stablehlo(g), "tf.aliasing_output = 0 : i32"), 1u);
  EXPECT_TRUE(static_cast<bool>(w));
}

TEST(Graph, ABodyCapturesAnOuterValueOnce) {
  Graph g;
  Tensor x = g.input("x", kVector), y = g.input("y", kVector);
  Graph body(g);
  Tensor arg = body.argument(kVector);
  Tensor a = apply(kTwin, {arg, x}), b = apply(kTwin, {x, a});
  EXPECT_EQ(&a.graph(), &body);
  EXPECT_EQ(&b.graph(), &body);
  ASSERT_EQ(body.captures().size(), 1u);
  EXPECT_EQ(body.captures()[0].first, x);
  apply(kTwin, {a, y});
  EXPECT_EQ(body.captures().size(), 2u);
}

TEST(Graph, ABodyInABodyCapturesThroughItsParent) {
  Graph g;
  Tensor x = g.input("x", kVector);
  Graph outer(g);
  Graph inner(outer);
  Tensor arg = inner.argument(kVector);
  apply(kTwin, {arg, x});
  ASSERT_EQ(outer.captures().size(), 1u);
  ASSERT_EQ(inner.captures().size(), 1u);
  EXPECT_EQ(outer.captures()[0].first, x);
  EXPECT_EQ(inner.captures()[0].first, outer.captures()[0].second);
}

TEST(Graph, ABodyRepeatsConstantsInsteadOfCapturingThem) {
  Graph g;
  Tensor c = apply_in(g, kNumber, 2.0);
  Graph body(g);
  Tensor arg = body.argument(kVector);
  Tensor y = apply(kTwin, {apply(kTwin, {arg, c}), c});
  EXPECT_TRUE(body.captures().empty());
  EXPECT_EQ(&y.node()->inputs[1].graph(), &body);
  EXPECT_EQ(body.nodes().size(), 4u);  // the argument, one constant, two equal nodes
}

TEST(Graph, ValuesOfABodyDoNotLeaveIt) {
  Graph g;
  Tensor x = g.input("x", kVector);
  Graph one(g), two(g);
  Tensor a = apply(kTwin, {one.argument(kVector), x}), b = two.argument(kVector);
  EXPECT_NE(message_of([&] {
              apply(kTwin, {a, b});
            }).find("values made inside a loop leave it only as results"),
            std::string::npos);
  EXPECT_EQ(message_of([&] { g.output("a", a); }), "output 'a' belongs to another graph");
}

TEST(Printer, LeavesDeadNodesOut) {
  Graph g;
  Tensor x = g.input("x", kVector), y = apply(kTwin, {x, x});
  apply(kTwin, {y, y});
  apply_in(g, kNumber, 4.0);
  g.output("y", y);
  std::string text = to_stablehlo(g);
  EXPECT_EQ(count(text, "test.twin"), 1u) << text;
  EXPECT_EQ(count(text, "stablehlo.constant"), 0u) << text;
}

TEST(Printer, PutsThePathOfEveryStatementInItsLocation) {
  Graph g;
  Tensor x = g.input("x", kVector);
  PathScope scope(g, "unet.conv_in");
  Tensor y = apply(kTwin, {x, x});
  g.set_backward(true);
  g.output("y", apply(kTwin, {y, x}));
  std::string text = to_stablehlo(g, "step");
  EXPECT_EQ(count(text, "module @step"), 1u);
  EXPECT_EQ(count(text, "\"unet.conv_in/twin\""), 1u) << text;
  EXPECT_EQ(count(text, "\"unet.conv_in/twin (grad)\""), 1u) << text;
}

TEST(Printer, ConstantsAreSharedWithinABlock) {
  Graph g;
  Tensor x = g.input("x", kVector);
  Tensor a = apply_multi(kPair, {x})[1], b = apply_multi(kPair, {a})[0];
  Tensor half = apply_in(g, kNumber, 0.5);
  Tensor c = apply_multi(kPair, {apply(kTwin, {b, half})})[0];
  g.output("c", apply(kTwin, {c, half}));
  std::string text = to_stablehlo(g);
  // Each of the two regions before the outer constant has its own; the region after it uses the outer one.
  EXPECT_EQ(count(text, "stablehlo.constant"), 3u) << text;
  EXPECT_EQ(count(text, "#1"), 1u) << text;
}

TEST(Printer, CatchesTextThatDisagreesWithTheShapeRule) {
  Graph g;
  PathScope scope(g, "somewhere");
  g.output("y", apply(kForgetful, {g.input("x", kVector)}));
  EXPECT_EQ(message_of([&] { to_stablehlo(g); }), "forgetful: printed f32[7], inferred f32[2], at somewhere");
}

TEST(Printer, AProgramWithoutOutputsIsAnError) {
  Graph g;
  EXPECT_EQ(message_of([&] { to_stablehlo(g, "empty"); }), "program 'empty' has no outputs");
}

TEST(Printer, EscapesNamesThatUsersChoose) {
  Graph g;
  Tensor x = g.input("a \"quoted\\name\"", kVector);
  PathScope scope(g, "block \"0\"");
  g.output("y", apply(kTwin, {x, x}));
  std::string text = to_stablehlo(g);
  EXPECT_EQ(count(text, "loc(\"a \\\"quoted\\\\name\\\"\")"), 1u) << text;
  EXPECT_EQ(count(text, "\"block \\\"0\\\"/twin\""), 1u) << text;
}

TEST(MlirFloat, ReadsBackAsTheSameNumber) {
  for (double v : {0.1, 1.0 / 3, 1e-38, 3.4028234e38, -2.5}) {
    EXPECT_EQ(std::strtof(mlir_float(static_cast<float>(v), DType::f32).c_str(), nullptr), static_cast<float>(v));
    EXPECT_EQ(std::strtod(mlir_float(v, DType::f64).c_str(), nullptr), v);
  }
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(mlir_float(-infinity, DType::bf16), "0xFF80");
  EXPECT_EQ(mlir_float(std::nan(""), DType::f16), "0x7E00");
  EXPECT_NE(message_of([&] { mlir_float(infinity, DType::f8e4m3fn); }), "no error");
}

TEST(Printer, ValuesHaveTheLayoutOfTheOptions) {
  GraphOptions options;
  options.mesh_axes = {{"fsdp", 2}};
  options.resolve = [](const LogicalAxes&, const Dims&) { return DimAxes{{"fsdp"}}; };
  options.memory_order = [](const LogicalAxes& axes, const Dims&) { return axes[0] == "out" ? Axes{2, 1, 0} : Axes{}; };
  Graph g(options);
  Tensor w = g.input("w", {DType::f32, {4, 3, 5}}, {"out", "in", ""}), x = g.input("x", {DType::f32, {4, 3, 5}});
  g.output("w", apply(kTwin, {w, x}), "w");
  g.alias("w", "w");
  g.output("y", apply(kTwin, {w, x}));
  const std::string text = to_stablehlo(g);
  EXPECT_EQ(count(text, "%arg0: tensor<5x3x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {\"fsdp\"}]>"), 1u)
      << text;
  EXPECT_EQ(count(text,
                  "-> (tensor<5x3x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {\"fsdp\"}]>}, "
                  "tensor<4x3x5xf32> {"),
            1u)
      << text;
  EXPECT_EQ(count(text, "\"stablehlo.transpose\"(%arg0) {permutation = array<i64: 2, 1, 0>}"), 1u) << text;
  EXPECT_EQ(count(text, "stablehlo.transpose"), 2u) << text;
  g.output("z", w);
  EXPECT_EQ(message_of([&] { g.alias("w", "z"); }), "alias 'w' to 'z': their memory layouts differ");
}

TEST(MlirText, ArraysAndShardings) {
  EXPECT_EQ(mlir_array({}), "array<i64>");
  EXPECT_EQ(mlir_array({1, -2}), "array<i64: 1, -2>");
  EXPECT_EQ(sdy_sharding({{"data", "fsdp"}, {}}, 3), "<@mesh, [{\"data\", \"fsdp\"}, {}, {}]>");
}

TEST(Printer, PrintsTheMeshAndTheShardingOfInputs) {
  GraphOptions options;
  options.mesh_axes = {{"data", 2}, {"tensor", 4}};
  options.resolve = [](const LogicalAxes& axes, const Dims&) {
    DimAxes out;
    for (const auto& a : axes)
      out.push_back(a == "batch" ? std::vector<std::string>{"data"} : std::vector<std::string>{});
    return out;
  };
  Graph g(options);
  Tensor x = g.input("x", {DType::f32, {4, 3}}, {"batch", "embed"});
  g.output("y", apply(kTwin, {x, x}), "x");
  std::string text = to_stablehlo(g);
  EXPECT_EQ(count(text, "sdy.mesh @mesh = <[\"data\"=2, \"tensor\"=4]>"), 1u) << text;
  EXPECT_EQ(count(text, "mhlo.num_partitions = 8"), 1u) << text;
  EXPECT_EQ(count(text, "sdy.sharding = #sdy.sharding<@mesh, [{\"data\"}, {}]>"), 2u) << text;
}

}  // namespace
}  // namespace md
