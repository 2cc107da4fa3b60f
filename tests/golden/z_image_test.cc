// ZImageTransformer2DModel compared with diffusers: outputs and all gradients on tiny random configs, for every way to
// run blocks.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/models/z_image_transformer.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

NamedTensors run_z_image(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {
      {"sample",
       z_image_transformer(
           s, ZImageTransformerConfig::from_json(json),
           {.sample = in.at("sample"), .time = in.at("time"), .text = in.at("text"), .lengths = in.at("lengths")})}};
}

class ZImageTransformer : public testing::TestWithParam<Variant> {};
TEST_P(ZImageTransformer, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_z_image); }

INSTANTIATE_TEST_SUITE_P(
    Goldens, ZImageTransformer,
    testing::Values(Variant{"TextsOfTwoLengths", "z_image"}, Variant{"OddSizes", "z_image_odd"},
                    Variant{"TextsThatFillTheirRoom", "z_image_full"},
                    Variant{"WithoutKernels", "z_image_odd", {}, false},
                    Variant{"ScannedAndRecomputed", "z_image", {.remat = "FULL", .scan_layers = true}},
                    Variant{"Flash", "z_image", {.attention = "flash", .flash_min_seq_length = 1}, false}),
    [](const auto& info) { return info.param.name; });

// Weights are exact in bf16; activations have 8 bits.
TEST(ZImageInBf16, GivesOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case("z_image");
  const ModelRun run = run_case(c, run_z_image, {.weights = DType::bf16, .activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.03) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.15) << "worst at " << grads.name;
}

}  // namespace
}  // namespace md
