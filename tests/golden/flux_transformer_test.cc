// FluxTransformer2DModel and Flux2Transformer2DModel compared with diffusers: outputs and all gradients on tiny random
// configs, for every way to run blocks.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "tests/golden/flux_case.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

class FluxTransformer : public testing::TestWithParam<Variant> {};
TEST_P(FluxTransformer, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_flux); }

INSTANTIATE_TEST_SUITE_P(
    Goldens, FluxTransformer,
    testing::Values(Variant{"Dev", "flux_dev"}, Variant{"Schnell", "flux_schnell"},
                    Variant{"ScannedAndRecomputed", "flux_dev", {.remat = "FULL", .scan_layers = true}},
                    Variant{"ScannedAndOptimized", "flux_schnell", {.remat = "FLUX_OPTIMIZED", .scan_layers = true}},
                    Variant{"Flash", "flux_schnell", {.attention = "flash", .flash_min_seq_length = 1}}),
    [](const auto& info) { return info.param.name; });

class Flux2Transformer : public testing::TestWithParam<Variant> {};
TEST_P(Flux2Transformer, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_flux2); }

INSTANTIATE_TEST_SUITE_P(
    Goldens, Flux2Transformer,
    testing::Values(Variant{"TwoReferenceImages", "flux2_klein"}, Variant{"Dev", "flux2_dev"},
                    Variant{"OneToken", "flux2_small"}, Variant{"WithoutKernels", "flux2_klein", {}, false},
                    Variant{"ScannedAndRecomputed", "flux2_klein", {.remat = "FULL", .scan_layers = true}},
                    Variant{"ScannedAndOptimized", "flux2_dev", {.remat = "FLUX_OPTIMIZED", .scan_layers = true}},
                    Variant{"Flash", "flux2_klein", {.attention = "flash", .flash_min_seq_length = 1}, false}),
    [](const auto& info) { return info.param.name; });

class FluxInBf16 : public testing::TestWithParam<const char*> {};

// Weights are exact in bf16; activations have 8 bits, except those in f32: condition embeddings, norms, modulation, the
// last projection.
TEST_P(FluxInBf16, GivesOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case(GetParam());
  const Forward forward = std::string_view(GetParam()).starts_with("flux2_") ? run_flux2 : run_flux;
  const ModelRun run = run_case(c, forward, {.weights = DType::bf16, .activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.02) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.1) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Goldens, FluxInBf16, testing::Values("flux_dev", "flux2_klein"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace md
