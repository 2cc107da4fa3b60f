// Quantized weights on the host and in programs, compared with bitsandbytes (tools/golden/quantized_files.py).
#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/nn/few_bits.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/scope.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

HostArrays golden(const std::string& name) {
  return SafetensorsReader::open(golden_path("quantized_files/" + name)).tensors();
}

double distance_of(const HostArray& got, const HostArray& want) {
  const std::vector<double> g = got.to_doubles(), w = want.to_doubles();
  double apart = 0, size = 0;
  for (size_t i = 0; i < w.size(); ++i) apart += (g.at(i) - w[i]) * (g[i] - w[i]), size += w[i] * w[i];
  return std::sqrt(apart / size);
}

TEST(FewBitsGolden, Nf4HasTheBytesOfBitsandbytes) {
  const HostArray x = golden("bnb_values.safetensors").at("nested");
  const HostArrays want = golden("bnb.safetensors");
  const std::vector<HostArray> got = few_bits_of(FewBitsType::nf4, x);
  const auto same = [](const HostArray& a, const HostArray& b) {
    size_t other = 0;
    EXPECT_EQ(a.bytes(), b.bytes());
    for (size_t i = 0; i < std::min(a.bytes(), b.bytes()); ++i) other += a.data()[i] != b.data()[i];
    return other;
  };
  EXPECT_EQ(same(got[0], want.at("nested.weight")), 0u);
  // One of 288 values is a midpoint of two table entries, to five digits; bitsandbytes' CPU kernel rounds it the other
  // way.
  const auto codes = want.at("nested.weight.absmax").view<uint8_t>(), written = got[1].view<uint8_t>();
  EXPECT_LE(same(got[1], want.at("nested.weight.absmax")), 1u);
  for (size_t i = 0; i < written.size(); ++i) EXPECT_NEAR(written[i], codes[i], 1);
  const auto nested = want.at("nested.weight.nested_absmax").view<float>(), ours = got[2].view<float>();
  ASSERT_EQ(nested.size(), ours.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_NEAR(ours[i], nested[i], 1e-7);
  const HostArray read = golden("bnb_values.safetensors").at("nested.read");
  EXPECT_LT(distance_of(widened(FewBitsType::nf4, got), read), 3e-4);
}

TEST(FewBitsGolden, Int8HasTheBytesOfBitsandbytes) {
  const HostArray x = golden("bnb_values.safetensors").at("int8");
  const HostArray want = golden("bnb.safetensors").at("int8.weight");
  const std::vector<HostArray> got = few_bits_of(FewBitsType::int8, x);
  for (size_t i = 0; i < want.bytes(); ++i) ASSERT_EQ(got[0].data()[i], want.data()[i]) << i;
  EXPECT_LT(distance_of(widened(FewBitsType::int8, got), golden("bnb_values.safetensors").at("int8.read")), 1e-6);
}

struct Result {
  HostArray output, gradient;
  size_t bytes = 0;  // of the parameters
};

/// Runs two layers, in a loop if `scan`, and returns their output and the gradient of their input.
Result run(const std::shared_ptr<const FewBits>& few_bits, const HostArray& weights, const HostArray& x, bool scan) {
  Graph g(cpu().graph_options());
  ParamTable params;
  const Scope s = Scope(g, params, "m", {.scan_layers = scan, .few_bits = few_bits}).frozen();
  const Tensor in = g.input("x", x.shape());
  const Tensor out = nn::repeat(s / "blocks", 2, in, [](const Scope& b, Tensor h) {
    return nn::linear(b / "a", h, {.out = h.dim(-1), .bias = false});
  });
  g.output("y", out);
  g.output("g", grad(sum(out * out), {in})[0]);
  HostArrays values;
  if (few_bits)
    values = few_bits_values(params, "m", [&](const std::string&) { return weights; });
  else
    for (const Param& p : params.params()) {
      HostArray all(p.shape);
      const size_t layers = all.bytes() / weights.bytes();
      for (size_t i = 0; i < layers; ++i)
        std::copy(weights.data(), weights.data() + weights.bytes(), all.mutable_data() + i * weights.bytes());
      values[p.input] = all;
    }
  Result r;
  for (const auto& [name, array] : values) r.bytes += array.bytes();
  values["x"] = x;
  std::vector<HostArray> inputs;
  for (const GraphInput& i : g.inputs()) inputs.push_back(values.at(i.name));
  const std::vector<HostArray> outputs = evaluate(cpu(), g, inputs);
  r.output = outputs.at(0);
  r.gradient = outputs.at(1);
  return r;
}

TEST(FewBitsGolden, ProgramsComputeWithTheNumbersThatTheHostReadsInLoopsAndOutside) {
  const HostArray source = golden("bnb_values.safetensors").at("nested");  // [96, 192]
  HostArray w({DType::f32, {128, 128}}), x({DType::f32, {5, 128}});
  const auto from = source.view<float>();
  for (size_t i = 0; i < w.view<float>().size(); ++i) w.mutable_view<float>()[i] = from[i];
  for (size_t i = 0; i < x.view<float>().size(); ++i) x.mutable_view<float>()[i] = 20 * from[i + 300];
  for (const FewBitsType type : {FewBitsType::int8, FewBitsType::float8, FewBitsType::nf4})
    for (const bool scan : {false, true}) {
      SCOPED_TRACE(static_cast<int>(type) * 2 + scan);
      const auto few_bits = std::make_shared<const FewBits>(FewBits{type, {}});
      const Result want = run(nullptr, widened(type, few_bits_of(type, w)), x, scan), got = run(few_bits, w, x, scan);
      EXPECT_LT(distance_of(got.output, want.output), 1e-5);
      EXPECT_LT(distance_of(got.gradient, want.gradient), 1e-5);
      EXPECT_LT(got.bytes * (type == FewBitsType::nf4 ? 7 : 3), want.bytes);
    }
}

}  // namespace
}  // namespace md
