#include "maxdiffusion/nn/quantization.h"

#include <gtest/gtest.h>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/nn/quantization_keys.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"

namespace md {
namespace {

QuantizationKeys keys(const std::string& kind, const std::string& modules = ".*") {
  QuantizationKeys k;
  k.use_qwix_quantization = true;
  k.quantization = kind;
  k.qwix_module_path = modules;
  return k;
}

template <class F>
std::string error_of(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config) << e.what();
    return e.what();
  }
  return "no error";
}
bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
size_t times(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

struct QuantizationTest : testing::Test {
  Graph g;
  ParamTable table;
  Tensor x = g.input("x", {DType::bf16, {2, 4, 4, 3}});
  Scope root(const QuantizationKeys& k, bool scan = false) {
    return Scope(g, table, "unet",
                 {.activations = DType::bf16, .scan_layers = scan, .quantization = make_quantization(k)});
  }
  /// Two blocks and a convolution.
  Tensor model(const Scope& s) {
    Tensor y =
        nn::repeat(s / "blocks", 2, x, [](const Scope& b, Tensor t) { return nn::linear(b / "to_q", t, {.out = 3}); });
    return nn::conv2d(s / "conv_out", y, {.out = 2});
  }
  std::string program(Tensor y) {
    g.output("y", y);
    return to_stablehlo(g);
  }
};

TEST_F(QuantizationTest, IntegersAreMultipliedIntoWideSums) {
  const std::string text = program(model(root(keys("int8"))));
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xi8>, tensor<3x3xi8>) -> tensor<2x4x4x3xi32>"), 2U) << text;
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xi8>, tensor<2x3x3x3xi8>) -> tensor<2x4x4x2xi32>"), 1U) << text;
  EXPECT_EQ(table.params()[0].shape.dtype, DType::f32);  // stored types are unchanged
}

TEST_F(QuantizationTest, ConvolutionsOfIntegersAreInBf16OnGpus) {
  GraphOptions options;
  options.platform = Platform::gpu;
  Graph on_gpu(options);
  const Tensor image = on_gpu.input("x", {DType::bf16, {2, 4, 4, 3}});
  const Scope s(on_gpu, table, "unet", {.activations = DType::bf16, .quantization = make_quantization(keys("int8"))});
  on_gpu.output("y", nn::conv2d(s / "conv", nn::linear(s / "to_q", image, {.out = 3}), {.out = 2}));
  const std::string text = to_stablehlo(on_gpu);
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xi8>, tensor<3x3xi8>) -> tensor<2x4x4x3xi32>"), 1U) << text;
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xbf16>, tensor<2x3x3x3xbf16>) -> tensor<2x4x4x2xf32>"), 1U) << text;
  EXPECT_EQ(times(text, "(tensor<2x4x4x2xf32>) -> tensor<2x4x4x2xi32>"), 1U) << text;
}

TEST_F(QuantizationTest, FloatsAreMultipliedIntoWideSums) {
  const std::string text = program(model(root(keys("fp8"))));
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xf8E4M3FN>, tensor<3x3xf8E4M3FN>) -> tensor<2x4x4x3xf32>"), 2U) << text;
  EXPECT_EQ(times(text, "(tensor<2x4x4x3xf8E4M3FN>, tensor<2x3x3x3xf8E4M3FN>) -> tensor<2x4x4x2xf32>"), 1U) << text;
}

// S2-110
TEST_F(QuantizationTest, OnlyModulesThatThePathMatchesFully) {
  const std::string text = program(model(root(keys("int8", R"(blocks\.1\..*|conv)"))));
  EXPECT_EQ(times(text, "-> tensor<2x4x4x3xi32>"), 1U) << text;
  EXPECT_EQ(times(text, "-> tensor<2x4x4x2xi32>"), 0U) << text;  // conv_out only starts with a named path
}

TEST_F(QuantizationTest, GradientsAreThoseOfTheProductItself) {
  Tensor y = model(root(keys("int8")));
  g.output("y", y);
  g.output("dx", grad(sum(cast(y, DType::f32)), {x})[0]);
  const std::string text = to_stablehlo(g);
  EXPECT_EQ(times(text, "-> tensor<2x4x4x3xi32>"), 2U) << text;  // only the forward pass is in integers
  EXPECT_FALSE(contains(text, "f8")) << text;
}

TEST_F(QuantizationTest, FullGradientsAreOfTheirOwnTypes) {
  Tensor y = model(root(keys("fp8_full")));
  g.output("dx", grad(sum(cast(y, DType::f32)), {x})[0]);
  const std::string text = to_stablehlo(g);
  EXPECT_EQ(times(text, "-> tensor<2x4x4x3xf8E5M2>"), 2U) << text;    // cotangents of the linear layers
  EXPECT_EQ(times(text, "-> tensor<2x4x4x2xf8E4M3FN>"), 1U) << text;  // and of the convolution
}

TEST_F(QuantizationTest, StackedBlocksAreQuantizedAllOrNotAtAll) {
  QuantizationKeys k = keys("int8");
  model(root(k, true));
  auto count = [&](const std::string& modules) {
    return count_quantized(*make_quantization(keys("int8", modules)), table);
  };
  EXPECT_EQ(count(".*").quantized, 3);
  EXPECT_EQ(count(".*").all, 3);
  EXPECT_EQ(count("blocks.*").quantized, 2);
  EXPECT_EQ(count("conv_out").quantized, 1);
  const std::string message = error_of([&] { count(R"(blocks\.0\..*)"); });
  EXPECT_TRUE(contains(message, "matches 1 of the 2 blocks blocks.*.to_q")) << message;
  EXPECT_TRUE(contains(message, "scan_layers")) << message;
  EXPECT_TRUE(make_quantization(keys("int8", R"(blocks\.[01]\.to_q)"))->covers("blocks.*.to_q"));
}

TEST_F(QuantizationTest, APathThatMatchesNothingIsRefusedWithNames) {
  model(root(keys("int8")));
  const std::string message = error_of([&] { count_quantized(*make_quantization(keys("int8", "block")), table); });
  EXPECT_TRUE(contains(message, "qwix_module_path 'block' matches none of 3 layers")) << message;
  EXPECT_TRUE(contains(message, "blocks.0.to_q")) << message;
}

TEST(QuantizationKeys, WhatTheyCannotMeanIsRefused) {
  auto refused = [](auto change) {
    QuantizationKeys k = keys("fp8_full");
    change(k);
    return error_of([&] { make_quantization(k); });
  };
  auto expect = [](const std::string& message, const std::string& part) {
    EXPECT_TRUE(contains(message, part)) << message;
  };
  expect(refused([](auto& k) { k.quantization = ""; }),
         "Quantization type is not set when use_qwix_quantization is enabled.");
  expect(refused([](auto& k) { k.quantization = "int4"; }),
         "Quantization type is not supported when use_qwix_quantization is enabled: int4");
  expect(refused([](auto& k) { k.qwix_module_path = "("; }), "qwix_module_path '(' is not a regular expression");
  for (const char* text : {"", "max", "absmax,", "absmax,a", "absmax,0", "absmax,1,2", "rms", "rms,1,2", "fixed",
                           "fixed,-1,2", "fixed,2,-2", "minmax", "absmax,inf"})
    expect(refused([&](auto& k) { k.quantization_calibration_method = text; }), "quantization_calibration_method '");
  expect(refused([](auto& k) { k.bwd_quantization_calibration_method = "none"; }),
         "bwd_quantization_calibration_method 'none'");
}

TEST(QuantizationKeys, OneMethodIsTheDefaultOfTheOthers) {
  QuantizationKeys k = keys("fp8_full");
  k.quantization_calibration_method = "absmax,0.5";
  k.act_quantization_calibration_method = "RMS, 3";
  k.bwd_quantization_calibration_method = "fixed,-4,4";
  const auto q = make_quantization(k);
  EXPECT_EQ(q->weight.method, Calibration::Method::absmax);
  EXPECT_EQ(q->weight.factor, 0.5);
  EXPECT_EQ(q->activation.method, Calibration::Method::rms);
  EXPECT_EQ(q->activation.factor, 3);
  EXPECT_EQ(q->gradient.method, Calibration::Method::fixed);
  EXPECT_EQ(q->gradient.factor, 4);
  k.quantization = "int8";
  EXPECT_EQ(make_quantization(k)->weight.factor, 1);
  k.use_qwix_quantization = false;
  EXPECT_EQ(make_quantization(k), nullptr);
}

}  // namespace
}  // namespace md
