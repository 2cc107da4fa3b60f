// Quantized products compared with qwix (tools/golden/quantization.py): integers and floats, outputs, all gradients;
// and their effect on whole models.
#include "maxdiffusion/nn/quantization.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/quantization_keys.h"
#include "maxdiffusion/ops/elementwise.h"
#include "tests/golden/flux_case.h"
#include "tests/golden/model_case.h"
#include "tests/golden/wan_case.h"

namespace md {
namespace {

QuantizationKeys keys(const std::string& kind, const std::string& modules = ".*") {
  QuantizationKeys k;
  k.use_qwix_quantization = true;
  k.quantization = kind;
  k.qwix_module_path = modules;
  return k;
}

ScopeOptions quantized(const std::string& kind, const std::string& modules = ".*") {
  return {.quantization = make_quantization(keys(kind, modules))};
}

QuantizationKeys keys(const nlohmann::json& config) {
  QuantizationKeys k = keys(config.at("quantization"), config.value("qwix_module_path", ".*"));
  k.weight_quantization_calibration_method = config.value("weight_quantization_calibration_method", "");
  k.act_quantization_calibration_method = config.value("act_quantization_calibration_method", "");
  k.bwd_quantization_calibration_method = config.value("bwd_quantization_calibration_method", "");
  return k;
}

NamedTensors stack(const Scope& s, const nlohmann::json&, NamedTensors& in) {
  Tensor x = square(nn::linear(s / "first", in.at("x"), {.out = 5}));
  x = square(nn::conv2d(s / "conv", x, {.out = 4}));
  return {{"y", nn::linear(s / "last", x, {.out = 3})}};
}

class QuantizedStack : public testing::TestWithParam<const char*> {};

// Both compute the same values in float32, so only the order of sums may differ. A value that this moves across the
// midpoint of two 8-bit numbers rounds differently. That is rare, but in a stack of a hundred values it is one percent.
// None does here.
// S2-105, S2-107…110, S4-95
TEST_P(QuantizedStack, GivesTheOutputsAndGradientsOfQwix) {
  const ModelCase c = load_case(std::string("quantized/") + GetParam());
  const ModelRun r = run_case(c, stack, {.quantization = make_quantization(keys(c.config))});
  const Distance out = distance(r.outputs, c.outputs), grads = distance(r.grads, c.grads);
  fmt::print("  outputs {:.2g}, gradients {:.2g} ({}); without quantization {:.2g} and {:.2g}\n", out.value,
             grads.value, grads.name, c.noise_floor_outputs, c.noise_floor_gradients);
  EXPECT_LE(out.value, 1e-6) << out.name;
  EXPECT_LE(grads.value, 2e-6) << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Kinds, QuantizedStack,
                         testing::Values("int8", "int8_some", "fp8", "fp8_full", "fp8_full_calibrated"),
                         [](const auto& info) { return std::string(info.param); });

// S2-105, S4-95
TEST(Quantize, MakesTheNumbersOfQwixToTheBit) {
  const HostArrays golden = SafetensorsReader::open(golden_path("quantized/values.safetensors")).tensors();
  const HostArray& x = golden.at("x");
  Graph g(cpu().graph_options());
  const Tensor in = g.input("x", x.shape());
  std::vector<std::string> names;
  auto put = [&](const std::string& name, Tensor t) {
    names.push_back(name);
    g.output(name, t);
  };
  const std::pair<const char*, Axes> kinds[] = {{"", {}}, {"0", {0}}, {"01", {0, 1}}};
  for (const auto& [type, dtype] :
       {std::pair{"int8", DType::s8}, std::pair{"e4m3", DType::f8e4m3fn}, std::pair{"e5m2", DType::f8e5m2}})
    for (const auto& [axes, channel_axes] : kinds) {
      const Quantized q = quantize(in, dtype, channel_axes);
      put(fmt::format("{}.{}.values", type, axes), dtype == DType::s8 ? q.values : cast(q.values, DType::f32));
      put(fmt::format("{}.{}.scale", type, axes), q.scale);
    }
  const std::vector<HostArray> got = evaluate(cpu(), g, {x});
  for (size_t i = 0; i < names.size(); ++i) {
    const HostArray& want = golden.at(names[i]);
    ASSERT_EQ(got[i].shape(), want.shape()) << names[i];
    const std::vector<double> a = got[i].to_doubles(), b = want.to_doubles();
    for (size_t k = 0; k < a.size(); ++k)
      EXPECT_EQ(a[k], b[k]) << names[i] << ", number " << k << " of " << x.to_doubles()[k % a.size()];
  }
}

// 127.5 steps cover the range from zero to the largest value of a row or channel, which is about 2.5 times the root
// mean square of its 6 to 20 values: an error of 2.5 / 127.5 / √12 = 0.6 percent, uniformly distributed, for each
// operand, and 0.8 percent for a product. Some ten products lie between input and output, but each block adds to a
// residual: the total is between one product's error and √10 times that.
// S2-105
TEST(Quantized, TransformerErrorIsQuantizationNoise) {
  const ModelCase c = load_case("wan_t2v");
  ScopeOptions options = quantized("int8");
  const ModelRun r = run_case(c, run_wan, options);
  const Distance out = distance(r.outputs, c.outputs), grads = distance(r.grads, c.grads);
  fmt::print("  outputs {:.2g}, gradients {:.2g} ({})\n", out.value, grads.value, grads.name);
  EXPECT_GT(out.value, 0.004);
  EXPECT_LE(out.value, 0.025);

  // The mantissa has three bits: steps of 1/16 to 1/8 of a value, so an error of at most 3.1 and typically 2.4 percent
  // for each operand.
  for (const auto& [kind, least, most] : {std::tuple{"fp8", 0.02, 0.1}, {"fp8_full", 0.02, 0.1}}) {
    const ModelRun floats = run_case(c, run_wan, quantized(kind));
    const Distance of_outputs = distance(floats.outputs, c.outputs), of_grads = distance(floats.grads, c.grads);
    fmt::print("  {}: outputs {:.2g}, gradients {:.2g} ({})\n", kind, of_outputs.value, of_grads.value, of_grads.name);
    EXPECT_GT(of_outputs.value, least) << kind;
    EXPECT_LE(of_outputs.value, most) << kind;
  }

  options.scan_layers = true;
  options.remat = "FULL";
  const ModelRun looped = run_case(c, run_wan, options);
  const Distance other_out = distance(looped.outputs, r.outputs), other_grads = distance(looped.grads, r.grads);
  fmt::print("  as a loop: outputs {:.2g}, gradients {:.2g} ({})\n", other_out.value, other_grads.value,
             other_grads.name);
  EXPECT_LE(other_out.value, 1e-5);
  EXPECT_LE(other_grads.value, 1e-4);
}

// As above; layers outside the blocks are not quantized.
TEST(Quantized, DoubleAndSingleStreamErrorIsQuantizationNoise) {
  const ModelCase c = load_case("flux_schnell");
  const ModelRun r = run_case(c, run_flux, quantized("int8", R"((single_)?transformer_blocks\..*)"));
  const Distance out = distance(r.outputs, c.outputs), grads = distance(r.grads, c.grads);
  fmt::print("  outputs {:.2g}, gradients {:.2g} ({})\n", out.value, grads.value, grads.name);
  EXPECT_GT(out.value, 0.002);
  EXPECT_LE(out.value, 0.025);
}

}  // namespace
}  // namespace md
