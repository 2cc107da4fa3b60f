#include "maxdiffusion/ops/elementwise.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

std::vector<Tensor> gate(const std::vector<Tensor>& in) { return {gated_gelu(in[0])}; }

TEST(GatedGeluKernel, AgreesWithTheCompilersOwnInF64) {
  // Gates up to ±10, where one side is the identity and the other nothing.
  expect_agreement(gate, {normal({DType::f32, {3, 70, 2 * 77}}, 1, 2.5)}, 1e-6,
                   {"md_gated_gelu", "md_gated_gelu_grad"});
  expect_agreement(gate, {normal({DType::bf16, {3, 70, 2 * 77}}, 1, 2.5)}, 4e-3,
                   {"md_gated_gelu", "md_gated_gelu_grad"});
}

}  // namespace
}  // namespace md
