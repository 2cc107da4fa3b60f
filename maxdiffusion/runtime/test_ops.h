// For tests only: operation records, so that the runtime is tested without ops/.
#pragma once

#include <span>
#include <vector>

#include "maxdiffusion/base/host_array.h"
#include "maxdiffusion/graph/emit.h"

namespace md {

inline const OpDef kTestAdd = {
    .name = "test_add",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.add"); },
};
/// [M, K] × [K, N].
inline const OpDef kTestMatmul = {
    .name = "test_matmul",
    .infer =
        [](const InferCtx& c) {
          return std::vector<Shape>{{c.in[0].dtype, {c.in[0].dim(0), c.in[1].dim(1)}}};
        },
    .emit =
        [](EmitCtx& c) {
          c.simple("stablehlo.dot_general",
                   "dot_dimension_numbers = #stablehlo.dot<lhs_contracting_dimensions = [1], "
                   "rhs_contracting_dimensions = [0]>");
        },
};
/// A call of the handler that the attribute names; the result has the operand's shape.
inline const OpDef kTestCall = {
    .name = "test_call",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit =
        [](EmitCtx& c) {
          c.simple("stablehlo.custom_call",
                   "call_target_name = \"" + c.attrs<std::string>() + "\", api_version = 4 : i32, backend_config = {}");
        },
};
/// An operation that does not compile.
inline const OpDef kTestNonsense = {
    .name = "test_nonsense",
    .infer = [](const InferCtx& c) { return std::vector<Shape>{c.in[0]}; },
    .emit = [](EmitCtx& c) { c.simple("stablehlo.no_such_statement"); },
};

inline HostArray floats(const Dims& dims, const std::vector<float>& values) {
  return HostArray::of<float>(Shape{DType::f32, dims}, values);
}
/// 0, 1, 2, … modulo `period`.
inline HostArray counting(const Dims& dims, int64_t period = 1 << 20) {
  HostArray a(Shape{DType::f32, dims});
  auto v = a.mutable_view<float>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(static_cast<int64_t>(i) % period);
  return a;
}

}  // namespace md
