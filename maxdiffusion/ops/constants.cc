// Tensors known when the graph is built: splats, small tables, and iota. They have no inputs and are cheap, so a loop
// body clones them instead of capturing them.
#include <cmath>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"

namespace md {
namespace {

struct Splat {
  double value;
  Shape shape;
};

constexpr OpDef kConstant = {
    .name = "constant",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.attrs<Splat>().shape}; },
    .emit = [](EmitCtx& c) { c.set_out(c.constant(c.attrs<Splat>().value, c.out())); },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {
          {{}, Splat{2.5, f64({2, 3})}}, {{}, Splat{-INFINITY, {DType::f32, {}}}}, {{}, Splat{7, {DType::u32, {4}}}}};
    },
    .cheap = true,
};

constexpr OpDef kTable = {
    .name = "table",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.attrs<HostArray>().shape()}; },
    .emit = [](EmitCtx& c) { c.set_out(c.table(c.attrs<HostArray>())); },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      constexpr double values[] = {0.5, -1.5, 3, 4, 5, 6};
      return {{{}, HostArray::of<double>(f64({2, 3}), values)}};
    },
};

struct Counting {
  Shape shape;
  int64_t axis;
};

constexpr OpDef kIota = {
    .name = "iota",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.attrs<Counting>().shape}; },
    .emit =
        [](EmitCtx& c) {
          c.simple("stablehlo.iota", "iota_dimension = " + std::to_string(c.attrs<Counting>().axis) + " : i64");
        },
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> {
      return {{{}, Counting{s32({2, 3}), 1}}, {{}, Counting{f64({4}), 0}}};
    },
    .cheap = true,
};

}  // namespace

Tensor constant(Graph& g, double value, DType dtype) { return full(g, value, Shape{dtype, {}}); }

Tensor full(Graph& g, double value, Shape shape) { return apply_in(g, kConstant, Splat{value, std::move(shape)}); }

Tensor full_like(Tensor x, double value) { return full(x.graph(), value, x.shape()); }

Tensor zeros_like(Tensor x) { return full_like(x, 0); }

std::optional<double> splat_value(Tensor x) {
  if (x.node()->op != &kConstant) return {};
  return x.node()->attrs<Splat>().value;
}

Tensor constant(Graph& g, const HostArray& values) {
  check(static_cast<bool>(values), Code::invalid_graph, "constant: the host array is empty");
  return apply_in(g, kTable, values);
}

Tensor iota(Graph& g, Shape shape, int64_t axis) {
  axis = normalize_axis(axis, shape.rank());
  return apply_in(g, kIota, Counting{std::move(shape), axis});
}

OpList constant_ops() { return {&kConstant, &kTable, &kIota}; }

}  // namespace md
