// Operations that compute nothing but have a meaning for autodiff, remat policies, or the compiler's scheduler.
#include <fmt/format.h>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"
#include "maxdiffusion/ops/samples.h"

namespace md {
namespace {

std::vector<Shape> same_as_inputs(const InferCtx& c) { return {c.in.begin(), c.in.end()}; }
void pass_through(EmitCtx& c) { c.set_out(c.in()); }
std::vector<OpSample> one_vector() { return {{{f64({3})}}}; }

constexpr OpDef kStopGradient = {
    .name = "stop_gradient",
    .infer = same_as_inputs,
    .emit = pass_through,
    .vjp = no_gradient,
    .samples = []() -> std::vector<OpSample> { return {{.inputs = {f64({3})}, .differentiate = {false}}}; },
};

constexpr OpDef kNamed = {
    .name = "named",
    .infer = same_as_inputs,
    .emit = pass_through,
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy()}; },
    .samples = one_vector,
    .cheap = true,
    .same_as = [](const Node&, int) { return size_t{0}; },
};

// If the value is stored to or read from a loop's buffer, the whole buffer is in that memory.
constexpr OpDef kPlace = {
    .name = "place",
    .infer = same_as_inputs,
    .emit =
        [](EmitCtx& c) {
          if (c.platform() == Platform::cpu) return c.set_out(c.in());
          c.set_out(in_memory(c, c.in(), c.attrs<Memory>() == Memory::host ? "pinned_host" : "device"));
        },
    .vjp = [](const VjpCtx& c) -> Grads { return {c.dy()}; },
    .samples = []() -> std::vector<OpSample> { return {{.inputs = {f64({3})}, .attributes = Memory::host}}; },
};

constexpr OpDef kBarrier = {
    .name = "optimization_barrier",
    .infer = same_as_inputs,
    .emit =
        [](EmitCtx& c) {
          std::vector<Value> in;
          for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
          // XLA's CPU backend compiles small loops as a whole, with an emitter that does not support barriers.
          // Recomputation in a loop needs none: the forward pass that it must not be merged with is in another loop.
          const bool in_loop = c.platform() == Platform::cpu && c.node().graph->in_loop();
          auto out = in_loop ? in : c.emit_multi("stablehlo.optimization_barrier", in, c.node().outputs);
          for (int i = 0; i < c.in_count(); ++i) c.set_out(out[static_cast<size_t>(i)], i);
        },
    .vjp =
        [](const VjpCtx& c) {
          Grads g;
          for (size_t i = 0; i < c.out_count(); ++i) g.push_back(c.dy(static_cast<int>(i)));
          return g;
        },
    .samples = []() -> std::vector<OpSample> {
      return {{{f64({3}), f64({2, 2})}}, {{f64({2})}}};
    },
};

}  // namespace

Tensor stop_gradient(Tensor x) { return apply(kStopGradient, {x}); }

Tensor named(Tensor x, std::string name) {
  Tensor y = apply(kNamed, {x});
  y.node()->name = std::move(name);
  return y;
}

Tensor place(Tensor x, Memory memory) {
  if (memory == Memory::host && x.graph().options().platform == Platform::cpu)
    log_info_once("remat_policy: offloading is ignored on CPUs");
  return apply(kPlace, {x}, memory);
}

std::vector<Tensor> optimization_barrier(const std::vector<Tensor>& xs) { return apply_multi(kBarrier, xs); }

OpList identity_ops() { return {&kStopGradient, &kNamed, &kPlace, &kBarrier}; }

}  // namespace md
