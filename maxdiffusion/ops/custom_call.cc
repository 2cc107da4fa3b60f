// Calls into compiled handlers: the graph knows the name and the shapes, nothing else.
#include "maxdiffusion/ops/custom_call.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

Axes row_major(const Shape& s) {
  Axes order;
  for (int64_t i = s.rank(); i-- > 0;) order.push_back(i);
  return order;
}

/// "[dense<[1, 0]> : tensor<2xindex>]", one per shape.
std::string layouts_of(const std::vector<Shape>& shapes, const std::vector<Axes>& given = {}) {
  std::string text;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Axes order = given.empty() ? row_major(shapes[i]) : given[i];
    text += fmt::format("{}dense<[{}]> : tensor<{}xindex>", i ? ", " : "", fmt::join(order, ", "), order.size());
  }
  return "[" + text + "]";
}

std::string aliases(const CustomCall& call) {
  std::string text;
  for (auto [result, operand] : call.in_place) {
    text += text.empty() ? "" : ", ";
    text += "#stablehlo.output_operand_alias<output_tuple_indices = [" +
            (call.results.size() > 1 ? std::to_string(result) : "") + "], operand_index = " + std::to_string(operand) +
            ", operand_tuple_indices = []>";
  }
  return "[" + text + "]";
}

/// No `vjp`: asking for the gradient is an error that names the call's path.
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
  std::vector<Shape> shapes;
  for (const Value& v : operands) shapes.push_back(v.shape);
  const std::string config = call.config_is_text ? mlir_string(call.backend_config) : "{" + call.backend_config + "}";
  return c.emit_multi(
      "stablehlo.custom_call", operands, call.results,
      fmt::format("call_target_name = \"{}\", api_version = {} : i32, has_side_effect = {}, operand_layouts = {}, "
                  "result_layouts = {}, output_operand_aliases = {}, backend_config = {}",
                  call.target, call.config_is_text ? 2 : 4, call.has_side_effect, layouts_of(shapes),
                  layouts_of(call.results, call.layouts), aliases(call), config));
}

bool one_kernel_type(const std::vector<Tensor>& arrays) {
  const DType type = arrays.front().dtype();
  return (type == DType::f32 || type == DType::bf16) &&
         std::ranges::all_of(arrays, [&](Tensor t) { return t.dtype() == type; });
}

bool kernels_take(const std::vector<Tensor>& arrays) {
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
