// Calls into compiled handlers: the graph has only the name and the shapes.
#include "maxdiffusion/ops/custom_call.h"

#include <algorithm>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

/// No `vjp`: the gradient is an error that names the call's path.
constexpr OpDef kCustomCall = {
    .name = "custom_call",
    .infer = [](const InferCtx& c) { return c.attrs<CustomCall>().results; },
    .emit =
        [](EmitCtx& c) {
          std::vector<Value> in;
          for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
          auto out = emit_custom_call(c, in, c.attrs<CustomCall>());
          for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
        },
};

}  // namespace

std::vector<Value> emit_custom_call(EmitCtx& c, const std::vector<Value>& operands, const CustomCall& call) {
  CustomCall renamed = call;
  if (call.in_place.empty() && !call.has_side_effect &&
      std::ranges::any_of(cpu_kernels(), [&](const Kernel& k) { return call.target == k.name; }))
    renamed.fused_by = kFusedCallsKernel;
  return c.emit_call(renamed, operands);
}

bool one_kernel_type(const std::vector<Tensor>& arrays) {
  const DType type = arrays.front().dtype();
  return (type == DType::f32 || type == DType::bf16) &&
         std::ranges::all_of(arrays, [&](Tensor t) { return t.dtype() == type; });
}

bool kernels_support(const std::vector<Tensor>& arrays) {
  return arrays.front().graph().options().calls_cpu_kernels() && one_kernel_type(arrays);
}

std::vector<Tensor> custom_call(Graph& g, const std::vector<Tensor>& inputs, CustomCall call) {
  if (!inputs.empty()) return apply_multi(kCustomCall, inputs, std::move(call));
  Node* node = g.add(kCustomCall, {}, std::move(call));
  std::vector<Tensor> out;
  for (size_t i = 0; i < node->outputs.size(); ++i) out.push_back(node->out(static_cast<int>(i)));
  return out;
}

OpList custom_call_ops() { return {&kCustomCall}; }

}  // namespace md
