// Qwen3 and the language part of Qwen2.5-VL against transformers: outputs and all gradients on tiny random configs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

/// The hidden states that the case has.
template <class Config>
NamedTensors run_decoder(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = Config::from_json(json);
  const std::vector<int64_t> layers =
      config.num_hidden_layers == 3 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{0, 2};
  const std::vector<Tensor> states = decoder_hidden_states(s, config, in.at("ids"), layers, in["lengths"]);
  NamedTensors out;
  for (size_t i = 0; i < layers.size(); ++i) {
    Tensor x = states[i];  // what padding gives, nobody reads where there is a mask
    if (Tensor mask = in["mask"]) x = x * broadcast_to(expand_dims(cast(mask, x.dtype()), 2), x.dims());
    out[fmt::format("state{}", layers[i])] = x;
  }
  return out;
}

class Qwen3 : public testing::TestWithParam<Way> {};
TEST_P(Qwen3, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_decoder<Qwen3Config>); }

INSTANTIATE_TEST_SUITE_P(Goldens, Qwen3,
                         testing::Values(Way{"GroupedHeads", "qwen3"}, Way{"OneGroupAndBiases", "qwen3_bias"},
                                         Way{"PaddingThatIsRead", "qwen3_padded"},
                                         Way{"PaddingWithoutKernels", "qwen3_padded", {}, false},
                                         Way{"WithoutKernels", "qwen3", {}, false},
                                         Way{"Recomputed", "qwen3", {.remat = "FULL"}}),
                         [](const auto& info) { return info.param.name; });

class Qwen25Vl : public testing::TestWithParam<Way> {};
TEST_P(Qwen25Vl, GivesTheOutputsAndGradientsOfTheReference) {
  expect_reference(GetParam(), run_decoder<Qwen25VlConfig>);
}

INSTANTIATE_TEST_SUITE_P(Goldens, Qwen25Vl,
                         testing::Values(Way{"GroupedHeads", "qwen25_vl"}, Way{"OneHead", "qwen25_vl_one_head"},
                                         Way{"WithoutKernels", "qwen25_vl", {}, false}),
                         [](const auto& info) { return info.param.name; });

// Weights are bf16 numbers; activations have 8 bits.
TEST(DecodersInBf16, GiveOutputsAndGradientsNearTheReference) {
  for (const auto& [golden, forward] : {std::pair<const char*, Forward>{"qwen3", run_decoder<Qwen3Config>},
                                        {"qwen25_vl", run_decoder<Qwen25VlConfig>}}) {
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
