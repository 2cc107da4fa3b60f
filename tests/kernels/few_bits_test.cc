// Numbers of few bits as the kernels widen them, compared with the host's code; and that products call the kernels.
#include "maxdiffusion/nn/few_bits.h"

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/dot.h"
#include "tests/kernels/agreement.h"

namespace md {
namespace {

HostArray called(const char* kernel, const std::vector<HostArray>& arrays, const Shape& result) {
  Graph g(one_device().graph_options());
  std::vector<Tensor> in;
  for (const HostArray& a : arrays) in.push_back(g.input("x" + std::to_string(in.size()), a.shape()));
  g.output("y", custom_call(g, in, {.target = kernel, .results = {result}, .backend_config = {}})[0]);
  return evaluate(one_device(), g, arrays)[0];
}

TEST(FewBitsKernels, WidenEveryByte) {
  for (const DType from : {DType::s8, DType::f8e4m3fn}) {
    HostArray bytes({from, {8, 32}});
    for (size_t i = 0; i < 256; ++i) bytes.mutable_data()[i] = static_cast<std::byte>(i);
    for (const DType to : {DType::f32, DType::bf16}) {
      const std::vector<double> found = called(kWidenKernel, {bytes}, {to, {8, 32}}).to_doubles(),
                                expected = bytes.to_doubles();
      for (size_t i = 0; i < 256; ++i)
        EXPECT_TRUE(found[i] == expected[i] || (std::isnan(found[i]) && std::isnan(expected[i])))
            << to_string(from) << " " << i << ": " << found[i] << ", expected " << expected[i];
    }
  }
}

TEST(FewBitsKernels, WidenNf4AsTheHostDoes) {
  const HostArray matrix = normal({DType::f32, {300, 192}}, 1, 0.1);  // 900 blocks: the last scale is of 132 of them
  const std::vector<HostArray> arrays = few_bits_of(FewBitsType::nf4, matrix);
  const HostArray expected = widened(FewBitsType::nf4, arrays);
  for (const DType to : {DType::f32, DType::bf16}) {
    const HostArray found = called(kWidenNf4Kernel, arrays, {to, matrix.dims()});
    EXPECT_EQ(found.to_doubles(), expected.cast(to).to_doubles()) << to_string(to);
  }
}

TEST(FewBitsKernels, ServeProductsAndTheirGradients) {
  for (const FewBitsType type : {FewBitsType::float8, FewBitsType::int8, FewBitsType::nf4}) {
    const std::vector<HostArray> arrays = few_bits_of(type, normal({DType::f32, {192, 128}}, 1, 0.1));
    const HostArray x = normal({DType::bf16, {96, 128}}, 2), dy = normal({DType::bf16, {96, 192}}, 3);
    const auto run = [&](CpuKernels kernels) {
      GraphOptions options = one_device().graph_options();
      options.cpu_kernels = kernels;
      Graph g(options);
      const Tensor in = g.input("x", x.shape());
      std::vector<Tensor> parts;
      for (const HostArray& a : arrays) parts.push_back(g.input("w" + std::to_string(parts.size()), a.shape()));
      const Tensor y = few_bits_product(type, {192, 128}, in, parts, [](Tensor a, Tensor w) {
        return dot(a, w, {.lhs_contract = {1}, .rhs_contract = {1}});
      });
      g.output("dx", vjp({y}, {g.input("dy", dy.shape())}, {in})[0]);
      g.output("y", y);
      const std::string kernel = type == FewBitsType::nf4 ? kWidenNf4Kernel : kWidenKernel;
      EXPECT_EQ(count(to_stablehlo(g), '"' + kernel + '"'), kernels.callable ? 2U : 0U) << "once in each pass";
      std::vector<HostArray> feed = {x};
      feed.insert(feed.end(), arrays.begin(), arrays.end());
      feed.push_back(dy);
      return evaluate(one_device(), g, feed);
    };
    const auto found = run({.callable = true, .f32_products = true}), expected = run({});
    // Products sum the same bf16 numbers in another order, and are rounded to bf16.
    for (size_t i = 0; i < 2; ++i) EXPECT_LE(relative_error(found[i], expected[i]), 8e-3) << i;
  }
}

}  // namespace
}  // namespace md
