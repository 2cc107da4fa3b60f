#include "maxdiffusion/ops/attention.h"

#include "maxdiffusion/autodiff/checkpoint.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

using Tensors = std::vector<Tensor>;
const std::vector<std::string> kCalls = {"md_attention", "md_attention_grad"};

struct Case {
  int64_t lq, lk, d, heads, batch;
  bool causal = false;
  double logits = 1;  // standard deviation of the logits
};

std::vector<HostArray> inputs(const Case& c, DType type = DType::f32) {
  const Shape q{type, {c.batch, c.lq, c.heads, c.d}}, k{type, {c.batch, c.lk, c.heads, c.d}};
  return {normal(q, 1, c.logits), normal(k, 2), normal(k, 3)};
}
TensorFn local_attention(bool causal = false) {
  return [causal](const Tensors& x) { return Tensors{attention(x[0], x[1], x[2], {.causal = causal})}; };
}

class AttentionKernel : public testing::TestWithParam<Case> {};

TEST_P(AttentionKernel, AgreesWithComposedOperationsInF64) {
  const Case& c = GetParam();
  expect_agreement(local_attention(c.causal), inputs(c), c.logits > 1 ? 1.5e-5 : 2e-6, kCalls);
}

INSTANTIATE_TEST_SUITE_P(Sizes, AttentionKernel,
                         testing::Values(Case{1, 1, 8, 1, 1},                  //
                                         Case{7, 7, 8, 3, 2},                  //
                                         Case{7, 7, 8, 3, 2, true},            //
                                         Case{1, 300, 64, 3, 2},               //
                                         Case{300, 2, 40, 1, 2},               //
                                         Case{64, 64, 40, 3, 2},               //
                                         Case{300, 77, 40, 3, 1},              //
                                         Case{77, 77, 64, 3, 2, true},         //
                                         Case{130, 130, 80, 1, 2},             //
                                         Case{300, 300, 64, 3, 2, true},       //
                                         Case{130, 300, 64, 1, 1, true},       // unused keys
                                         Case{300, 130, 8, 3, 1, true},        //
                                         Case{200, 1100, 40, 1, 1},            // gradients in several key blocks
                                         Case{1100, 1100, 8, 1, 2, true},      //
                                         Case{130, 130, 64, 3, 1, false, 25},  // logits up to ±80
                                         Case{300, 300, 40, 1, 2, true, 25}));

TEST(AttentionKernelInBf16, RoundsOnlyItsResults) {
  for (const Case& c : {Case{130, 77, 40, 3, 2}, Case{130, 130, 80, 1, 2, true}, Case{64, 1100, 8, 1, 1}})
    expect_agreement(local_attention(c.causal), inputs(c, DType::bf16), 6e-3, kCalls);
}

TEST(AttentionKernelInBf16, MultipliesBf16WhereThatIsFaster) {
  if (!runs_bf16_products()) GTEST_SKIP() << "this processor has no products of bf16";
  for (const Case& c :
       {Case{130, 77, 40, 3, 2}, Case{130, 130, 80, 1, 2, true}, Case{64, 1100, 8, 1, 1}, Case{1, 1, 8, 1, 1},
        Case{600, 300, 64, 1, 1}, Case{600, 600, 40, 3, 1, true}, Case{300, 1100, 8, 1, 1, true}}) {
    SCOPED_TRACE(testing::Message() << c.lq << " queries, " << c.lk << " keys");
    expect_agreement(local_attention(c.causal), inputs(c, DType::bf16), 1.2e-2, kCalls, true);
  }
}

// One sample uses all keys, one some, and one a single key.
TEST(AttentionKernelWithLengths, AgreesWithComposedOperationsInF64) {
  for (const Case& c :
       {Case{7, 7, 8, 3, 3}, Case{300, 300, 64, 2, 3}, Case{300, 300, 64, 1, 3, true}, Case{64, 1100, 40, 1, 3}}) {
    SCOPED_TRACE(testing::Message() << c.lq << " queries, " << c.lk << " keys");
    auto masked = [&](const Tensors& x) {
      const std::vector<int32_t> each = {static_cast<int32_t>(c.lk), static_cast<int32_t>(c.lk / 2 + 1), 1};
      Tensor lengths = constant(x[0].graph(), HostArray::of<int32_t>(Shape{DType::s32, {3}}, each));
      return Tensors{attention(x[0], x[1], x[2], {.causal = c.causal, .lengths = lengths})};
    };
    expect_agreement(masked, inputs(c), 1e-5,
                     kCalls);  // with one key, gradients are differences of equal numbers
    expect_agreement(masked, inputs(c, DType::bf16), 6e-3, kCalls);
  }
}

TEST(AttentionKernelInGraphs, IsCalledAgainUnderCheckpoint) {
  const auto in = inputs({130, 77, 40, 3, 2});
  const std::vector<HostArray> dy = {normal(in[0].shape(), 4)};
  const auto reference = outputs_and_gradients(local_attention(), in, dy, {.callable = true}, kCalls);
  int calls = 0;
  auto again = [&](const Tensors& x) {
    return checkpoint([&](const Node& n) { return calls += n.op->name == std::string("attention"), Keep::recompute; },
                      local_attention(), x);
  };
  const auto recomputed = outputs_and_gradients(again, in, dy, {.callable = true}, kCalls);
  EXPECT_EQ(calls, 1);
  for (size_t i = 0; i < reference.size(); ++i) EXPECT_EQ(reference[i].to_doubles(), recomputed[i].to_doubles());
}

TEST(AttentionKernelInGraphs, IsCalledInLoops) {
  auto repeated = [](const Tensors& x) {
    return scan(3, {x[0]},
                [&](ScanStep&, const Tensors& carry) {
                  return ScanResult{{attention(carry[0], x[1], x[2])}, {}};
                })
        .carry;
  };
  expect_agreement(repeated, inputs({64, 64, 8, 3, 2}), 5e-6, kCalls);
}

TEST(AttentionKernelInGraphs, LeavesABiasToComposedOperations) {
  Graph g(one_device().graph_options());
  Tensor q = g.input("q", {DType::f32, {1, 4, 2, 8}}), bias = g.input("bias", {DType::f32, {4, 4}});
  g.output("y", attention(q, q, q, {.bias = bias}));
  EXPECT_EQ(to_stablehlo(g).find("custom_call"), std::string::npos);
}

TEST(AttentionKernelInGraphs, HasNoSecondDerivative) {
  Graph g(one_device().graph_options());
  Tensor q = g.input("q", {DType::f32, {1, 4, 2, 8}});
  Tensor dq = grad(sum(square(attention(q, q, q))), {q})[0];
  try {
    grad(sum(dq), {q});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("attention_grad has no gradient rule"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace md
