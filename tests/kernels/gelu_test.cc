#include "maxdiffusion/ops/elementwise.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

struct Kind {
  const char* name;
  Tensor (*of)(Tensor);
};
class GeluKernel : public testing::TestWithParam<Kind> {};

TEST_P(GeluKernel, AgreesWithTheCompilersOwnInF64) {
  auto f = [](const std::vector<Tensor>& in) { return std::vector{GetParam().of(in[0])}; };
  // Gates up to ±10, where GELU is the identity or zero.
  for (DType type : {DType::f32, DType::bf16})
    expect_agreement(f, {normal({type, {3, 70, 154}}, 1, 2.5)}, type == DType::f32 ? 1e-6 : 4e-3,
                     {"md_gelu", "md_gelu_grad"});
}

INSTANTIATE_TEST_SUITE_P(Kinds, GeluKernel,
                         testing::Values(Kind{"exact", gelu}, Kind{"gated", gated_gelu}, Kind{"by_tanh", gelu_tanh},
                                         Kind{"quick", quick_gelu}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace md
