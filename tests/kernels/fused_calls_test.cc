// Neighbouring kernel calls fused into one: which calls are fused, and that results are unchanged.
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/ops/control_flow.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

/// The program text of `f` on f32 inputs of these shapes, for one CPU device.
std::string text_of(const TensorFn& f, const std::vector<Dims>& shapes) {
  GraphOptions options = one_device().graph_options();
  options.cpu_kernels = {.callable = true, .f32_products = true, .bf16_products = true};
  Graph g(options);
  std::vector<Tensor> in;
  for (const Dims& dims : shapes) in.push_back(g.input("x" + std::to_string(in.size()), {DType::f32, dims}));
  for (Tensor y : f(in)) g.output("y" + std::to_string(g.outputs().size()), y);
  return to_stablehlo(g);
}

Tensor product(Tensor a, Tensor b) { return matmul(a, b); }

// a·b, and its halves reshaped and multiplied by c: three products, two of which read the first one's result.
std::vector<Tensor> chain(const std::vector<Tensor>& in) {
  const Tensor y = product(in[0], in[1]), z = reshape(y, {128, 32});
  return {product(z, in[2]), product(product(y, in[3]), in[3])};
}
const std::vector<Dims> kChain = {{64, 48}, {48, 64}, {32, 40}, {64, 64}};

// P-22
TEST(FusedCalls, CallsThatReadEachOthersResultsAreOne) {
  const std::string text = text_of(chain, kChain);
  EXPECT_EQ(count(text, "stablehlo.custom_call"), 1u);
  EXPECT_EQ(count(text, "call_target_name = \"md_fused_calls\""), 1u);
  EXPECT_EQ(count(text, "kernel = \"md_product\""), 4u);
  EXPECT_EQ(count(text, "stablehlo.reshape"), 0u) << "what only the run reads needs no view";
  // Only the fused call reads y and y·d, 64 × 64 each; both are alive while y·d is computed.
  EXPECT_EQ(count(text, "tensor<32768xui8>"), 1u);
}

// P-22
TEST(FusedCalls, GiveWhatTheCompilerGives) {
  for (DType type : {DType::f32, DType::bf16}) {
    std::vector<HostArray> xs;
    for (const Dims& dims : kChain) xs.push_back(normal({type, dims}, static_cast<unsigned>(xs.size()) + 1));
    expect_agreement(chain, xs, type == DType::f32 ? 4e-6 : 2e-2, {"md_fused_calls", "md_product"});
  }
}

TEST(FusedCalls, TakeTurnsInTheMemoryOfWhatOnlyTheyRead) {
  auto long_chain = [](const std::vector<Tensor>& in) {
    Tensor y = in[0];
    for (int i = 0; i < 8; ++i) y = product(y, in[1]);
    return std::vector{y};
  };
  // Two of seven intermediate results are alive at a time.
  EXPECT_EQ(count(text_of(long_chain, {{64, 64}, {64, 64}}), "tensor<32768xui8>"), 1u);
  expect_agreement(long_chain, {normal({DType::f32, {64, 64}}, 1), normal({DType::f32, {64, 64}}, 2, 0.1)}, 1e-5,
                   {"md_fused_calls"});
}

TEST(FusedCalls, EndAtAnotherStatement) {
  auto f = [](const std::vector<Tensor>& in) { return std::vector{product(sin(product(in[0], in[1])), in[1])}; };
  const std::string text = text_of(f, {{64, 64}, {64, 64}});
  EXPECT_EQ(count(text, "md_fused_calls"), 0u);
  EXPECT_EQ(count(text, "call_target_name = \"md_product\""), 2u);
}

// A fused call reads the result of another one through a separate statement; a third product depends on neither.
TEST(FusedCalls, AreInDependencyOrder) {
  auto f = [](const std::vector<Tensor>& in) {
    const Tensor a = product(in[0], in[1]), b = product(in[1], in[0]);
    const Tensor c = product(sin(a), b), d = product(in[0], in[0]);
    return std::vector{c + sin(b), product(d, cos(c)), a};
  };
  EXPECT_EQ(count(text_of(f, {{64, 64}, {64, 64}}), "call_target_name = \"md_fused_calls\""), 2u);
  expect_agreement(f, {normal({DType::f32, {64, 64}}, 1, 0.3), normal({DType::f32, {64, 64}}, 2, 0.3)}, 1e-4,
                   {"md_fused_calls"});
}

TEST(FusedCalls, AreAsLongAsTheirLimit) {
  auto f = [](const std::vector<Tensor>& in) {
    Tensor y = in[0];
    for (int i = 0; i < 33; ++i) y = product(y, in[1]);
    return std::vector{y};
  };
  const std::string text = text_of(f, {{64, 64}, {64, 64}});
  EXPECT_EQ(count(text, "kernel = \"md_product\""), 32u);
  EXPECT_EQ(count(text, "call_target_name = \"md_product\""), 1u);
}

TEST(FusedCalls, AreMadeInTheBodiesOfLoops) {
  auto f = [](const std::vector<Tensor>& in) {
    auto body = [&](ScanStep&, const std::vector<Tensor>& y) {
      return ScanResult{{product(product(y[0], in[1]), in[1])}, {}};
    };
    return scan(3, {in[0]}, body).carry;
  };
  const std::string text = text_of(f, {{64, 64}, {64, 64}});
  EXPECT_EQ(count(text, "call_target_name = \"md_fused_calls\""), 1u);
}

TEST(FusedCalls, OfUnknownKernelsAreRefusedByName) {
  auto message = [](const std::string& config) -> std::string {
    Graph g(one_device().graph_options());
    const Tensor x = g.input("x", {DType::f32, {4}});
    g.output("y", custom_call(g, {x},
                              {.target = "md_fused_calls",
                               .results = {x.shape()},
                               .backend_config = config,
                               .has_side_effect = true})[0]);
    try {
      evaluate(one_device(), g, {normal({DType::f32, {4}}, 1)});
    } catch (const Error& e) {
      return e.message();
    }
    return "none";
  };
  const std::string arrays = "arrays = array<i64: 0, 0, 11, 1, 4, 1, 0, 11, 1, 4>";
  EXPECT_NE(message("c0000 = {kernel = \"md_none\", attributes = {}, operands = 1 : i64, " + arrays + "}")
                .find("there is no kernel 'md_none'"),
            std::string::npos);
  EXPECT_NE(message("c0000 = {kernel = \"md_add\", attributes = {}, operands = 1 : i64}").find("lacks"),
            std::string::npos);
  EXPECT_NE(message("c0000 = {kernel = \"md_add\", attributes = {}, operands = 1 : i64, arrays = array<i64: 2, 0, 11, "
                    "1, 4>}")
                .find("not among the run's"),
            std::string::npos);
}

// ---- kernels that connect the parts of a fused call

TEST(AddKernel, AgreesWithTheCompilersOwnInF64) {
  auto sum_of_products = [](const std::vector<Tensor>& in) {
    return std::vector{product(in[0], in[1]) + product(in[1], in[0])};
  };
  auto biased = [](const std::vector<Tensor>& in) {  // one bias per index of the first axis
    const Tensor y = dot(in[0], in[1], {.lhs_contract = {2}, .rhs_contract = {0}});
    return std::vector{add_bias(y, in[2])};
  };
  for (DType type : {DType::f32, DType::bf16}) {
    const double tolerance = type == DType::f32 ? 2e-6 : 8e-3;
    expect_agreement(sum_of_products, {normal({type, {131, 131}}, 1), normal({type, {131, 131}}, 2)}, tolerance,
                     {"md_add"});
    expect_agreement(biased, {normal({type, {3, 70, 40}}, 1), normal({type, {40, 50}}, 2), normal({type, {3, 50}}, 3)},
                     tolerance, {"md_add", "md_column_sums"});
  }
}

TEST(ConcatenateKernel, GivesWhatTheCompilerGives) {
  for (int64_t axis : {0, 1}) {
    auto f = [axis](const std::vector<Tensor>& in) {
      const Tensor y = product(in[0], in[1]);
      return std::vector{concatenate({y, in[0], y}, axis)};
    };
    for (DType type : {DType::f32, DType::bf16})
      expect_agreement(f, {normal({type, {70, 70}}, 1), normal({type, {70, 70}}, 2)}, type == DType::f32 ? 2e-6 : 8e-3,
                       {"md_concatenate"});
  }
}

}  // namespace
}  // namespace md
