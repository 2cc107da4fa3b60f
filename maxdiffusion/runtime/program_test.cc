// The chain graph → executable → device arrays, on the real plugin.
#include "maxdiffusion/runtime/runtime.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"

namespace md {
namespace {

/// Records of the test's own, so that the runtime is tested without the library of ops.
const OpDef kAdd = {
    .name = "test_add",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.add"); },
};

HostArray floats(const Dims& dims, const std::vector<float>& values) {
  return HostArray::of<float>(Shape{DType::f32, dims}, values);
}

TEST(Program, EvaluateRunsAGraphOnTheDefaultPlugin) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {3}}), y = g.input("y", {DType::f32, {3}});
  g.output("sum", apply(kAdd, {x, y}));
  auto out = evaluate(devices, g, {floats({3}, {1, 2, 3}), floats({3}, {10, 20, 30})});
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{11, 22, 33}));
}

}  // namespace
}  // namespace md
