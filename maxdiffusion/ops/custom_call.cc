// Calls into compiled handlers: the graph knows the name and the shapes, nothing else.
#include "maxdiffusion/ops/custom_call.h"

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

/// No `vjp`: asking for the gradient is an error that names the call's path.
constexpr OpDef kCustomCall = {
    .name = "custom_call",
    .infer = [](const InferCtx& c) { return c.attrs<CustomCall>().results; },
    .emit =
        [](EmitCtx& c) {
          const auto& call = c.attrs<CustomCall>();
          std::vector<Value> in;
          for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
          auto out = c.emit_multi("stablehlo.custom_call", in, call.results,
                                  "call_target_name = \"" + call.target + "\", api_version = 4 : i32, " +
                                      "has_side_effect = " + (call.has_side_effect ? "true" : "false") +
                                      ", backend_config = {" + call.backend_config + "}");
          for (size_t i = 0; i < out.size(); ++i) c.set_out(out[i], static_cast<int>(i));
        },
};

}  // namespace

std::vector<Tensor> custom_call(Graph& g, const std::vector<Tensor>& inputs, CustomCall call) {
  if (!inputs.empty()) return apply_multi(kCustomCall, inputs, std::move(call));
  Node* node = g.add(kCustomCall, {}, std::move(call));
  std::vector<Tensor> out;
  for (size_t i = 0; i < node->outputs.size(); ++i) out.push_back(node->out(static_cast<int>(i)));
  return out;
}

OpList custom_call_ops() { return {&kCustomCall}; }

}  // namespace md
