// FluxTransformer2DModel against diffusers: outputs and all gradients on tiny random configs, in every way that blocks
// are run.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "tests/golden/flux_case.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

// The goldens are of a float64 run; diffusers' own float32 run is one noise floor away from it.
constexpr double kNoiseFloors = 10;

struct Way {
  const char *name, *golden;
  ScopeOptions options = {};
};
void PrintTo(const Way& w, std::ostream* os) { *os << w.name; }
class FluxTransformer : public testing::TestWithParam<Way> {};

TEST_P(FluxTransformer, GivesTheOutputsAndGradientsOfTheReference) {
  const ModelCase c = load_case(GetParam().golden);
  const ModelRun run = run_case(c, run_flux, GetParam().options);
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}; noise floor {:.2g}), gradients {:.2g} ({}; noise floor {:.2g})\n", out.value,
             out.name, c.noise_floor_outputs, grads.value, grads.name, c.noise_floor_gradients);
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "first at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(
    Goldens, FluxTransformer,
    testing::Values(Way{"Dev", "flux_dev"}, Way{"Schnell", "flux_schnell"},
                    Way{"ScannedAndRecomputed", "flux_dev", {.remat = "FULL", .scan_layers = true}},
                    Way{"ScannedAndOptimized", "flux_schnell", {.remat = "FLUX_OPTIMIZED", .scan_layers = true}},
                    Way{"Flash", "flux_schnell", {.attention = "flash", .flash_min_seq_length = 1}}),
    [](const auto& info) { return info.param.name; });

// Weights are bf16 numbers; activations have 8 bits, but for what is in f32: the conditions' embeddings, norms,
// modulation, the last projection.
TEST(FluxInBf16, GivesOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case("flux_dev");
  const ModelRun run = run_case(c, run_flux, {.weights = DType::bf16, .activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.02) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.1) << "worst at " << grads.name;
}

}  // namespace
}  // namespace md
