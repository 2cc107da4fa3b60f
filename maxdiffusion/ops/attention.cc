#include "maxdiffusion/ops/attention.h"

#include <cmath>
#include <limits>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// The plain expression: logits, softmax and product as separate operations.
Tensor dot_product(Tensor q, Tensor k, Tensor v, const AttentionOptions& o) {
  Tensor logits = dot(
      q * o.scale, k,
      {.lhs_contract = {3}, .rhs_contract = {3}, .lhs_batch = {0, 2}, .rhs_batch = {0, 2}, .precision = o.precision},
      DType::f32);
  if (o.bias) logits = logits + cast(o.bias, DType::f32);
  if (o.causal) {
    const Shape square{DType::s32, {q.dim(1), k.dim(1)}};
    Tensor seen = ge(iota(q.graph(), square, 0), iota(q.graph(), square, 1));
    logits = where(seen, logits, scalar_like(logits, std::numeric_limits<float>::lowest()));
  }
  Tensor weights = cast(softmax(logits), v.dtype());
  Tensor y = dot(
      weights, v,
      {.lhs_contract = {3}, .rhs_contract = {1}, .lhs_batch = {0, 1}, .rhs_batch = {0, 2}, .precision = o.precision});
  return cast(transpose(y, {0, 2, 1, 3}), q.dtype());
}

struct Kernel {
  const char* name;
  Tensor (*run)(Tensor, Tensor, Tensor, const AttentionOptions&);
};
constexpr Kernel kKernels[] = {{"dot_product", dot_product}};

}  // namespace

Tensor attention(Tensor q, Tensor k, Tensor v, AttentionOptions o) {
  check(q.rank() == 4 && k.rank() == 4 && v.shape() == k.shape() && q.dim(0) == k.dim(0) && q.dim(2) == k.dim(2) &&
            q.dim(3) == k.dim(3),
        Code::invalid_graph, "attention: q {}, k {}, v {} are not [B, L, H, D]", to_string(q.shape()),
        to_string(k.shape()), to_string(v.shape()));
  if (o.scale == 0) o.scale = 1 / std::sqrt(static_cast<double>(q.dim(-1)));
  std::string known;
  for (const Kernel& kernel : kKernels) {
    if (o.kernel == kernel.name) return kernel.run(q, k, v, o);
    known += (known.empty() ? "" : ", ") + std::string(kernel.name);
  }
  fail(Code::invalid_config, "attention '{}' is not one of: {}", o.kernel, known);
}

}  // namespace md
