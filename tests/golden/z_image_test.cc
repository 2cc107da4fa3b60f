// ZImageTransformer2DModel and Qwen3 against diffusers and transformers: outputs and all gradients on tiny random
// configs, in every way that blocks are run.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/models/qwen3.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

// The goldens are of a float64 run; the reference's own float32 run is one noise floor away from it.
constexpr double kNoiseFloors = 10;

NamedTensors run_z_image(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {
      {"sample",
       z_image_transformer(
           s, ZImageTransformerConfig::from_json(json),
           {.sample = in.at("sample"), .time = in.at("time"), .text = in.at("text"), .lengths = in.at("lengths")})}};
}

NamedTensors run_qwen3(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = Qwen3Config::from_json(json);
  const std::vector<int64_t> layers =
      config.num_hidden_layers == 3 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{0, 2};
  const std::vector<Tensor> states = qwen3_hidden_states(s, config, in.at("ids"), layers);
  NamedTensors out;
  for (size_t i = 0; i < layers.size(); ++i)  // what padding gives, nobody reads
    out[fmt::format("state{}", layers[i])] =
        states[i] * broadcast_to(expand_dims(cast(in.at("mask"), states[i].dtype()), 2), states[i].dims());
  return out;
}

struct Way {
  const char *name, *golden;
  ScopeOptions options = {};
  bool kernels = true;
};
void PrintTo(const Way& w, std::ostream* os) { *os << w.name; }

void expect_reference(const Way& way, const Forward& forward) {
  const ModelCase c = load_case(way.golden);
  const ModelRun run = run_case(c, forward, way.options, way.kernels);
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}; noise floor {:.2g}), gradients {:.2g} ({}; noise floor {:.2g})\n", out.value,
             out.name, c.noise_floor_outputs, grads.value, grads.name, c.noise_floor_gradients);
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "first at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

class ZImageTransformer : public testing::TestWithParam<Way> {};
TEST_P(ZImageTransformer, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_z_image); }

INSTANTIATE_TEST_SUITE_P(
    Goldens, ZImageTransformer,
    testing::Values(Way{"TextsOfTwoLengths", "z_image"}, Way{"OddSizes", "z_image_odd"},
                    Way{"TextsThatFillTheirRoom", "z_image_full"}, Way{"WithoutKernels", "z_image_odd", {}, false},
                    Way{"ScannedAndRecomputed", "z_image", {.remat = "FULL", .scan_layers = true}},
                    Way{"Flash", "z_image", {.attention = "flash", .flash_min_seq_length = 1}, false}),
    [](const auto& info) { return info.param.name; });

class Qwen3 : public testing::TestWithParam<Way> {};
TEST_P(Qwen3, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_qwen3); }

INSTANTIATE_TEST_SUITE_P(Goldens, Qwen3,
                         testing::Values(Way{"GroupedHeads", "qwen3"}, Way{"OneGroupAndBiases", "qwen3_bias"},
                                         Way{"WithoutKernels", "qwen3", {}, false},
                                         Way{"Recomputed", "qwen3", {.remat = "FULL"}}),
                         [](const auto& info) { return info.param.name; });

// Weights are bf16 numbers; activations have 8 bits.
TEST(ZImageInBf16, GivesOutputsAndGradientsNearTheReference) {
  for (const auto& [golden, forward] :
       {std::pair<const char*, Forward>{"z_image", run_z_image}, {"qwen3", run_qwen3}}) {
    const ModelCase c = load_case(golden);
    const ModelRun run = run_case(c, forward, {.weights = DType::bf16, .activations = DType::bf16});
    const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
    fmt::print("  {}: outputs {:.2g} ({}), gradients {:.2g} ({})\n", golden, out.value, out.name, grads.value,
               grads.name);
    EXPECT_LE(out.value, 0.03) << golden << ", worst at " << out.name;
    EXPECT_LE(grads.value, 0.15) << golden << ", worst at " << grads.name;
  }
}

}  // namespace
}  // namespace md
