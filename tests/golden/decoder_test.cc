// Qwen3 and the language part of Qwen2.5-VL compared with transformers: outputs and all gradients on tiny random
// configs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.message();
  }
  return "no error";
}

/// The hidden states that the golden records.
template <class Config>
NamedTensors run_decoder(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = Config::from_json(json);
  const std::vector<int64_t> layers =
      config.num_hidden_layers == 3 ? std::vector<int64_t>{1, 2, 3} : std::vector<int64_t>{0, 2};
  const std::vector<Tensor> states = decoder_hidden_states(s, config, in.at("ids"), layers, in["lengths"]);
  NamedTensors out;
  for (size_t i = 0; i < layers.size(); ++i) {
    Tensor x = states[i];  // a model with a mask never reads the states of padding
    if (Tensor mask = in["mask"]) x = x * broadcast_to(expand_dims(cast(mask, x.dtype()), 2), x.dims());
    out[fmt::format("state{}", layers[i])] = x;
  }
  return out;
}

class Qwen3 : public testing::TestWithParam<Variant> {};
TEST_P(Qwen3, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_decoder<Qwen3Config>); }

INSTANTIATE_TEST_SUITE_P(Goldens, Qwen3,
                         testing::Values(Variant{"GroupedHeads", "qwen3"}, Variant{"OneGroupAndBiases", "qwen3_bias"},
                                         Variant{"PaddingThatIsRead", "qwen3_padded"},
                                         Variant{"PaddingWithoutKernels", "qwen3_padded", {}, false},
                                         Variant{"WithoutKernels", "qwen3", {}, false},
                                         Variant{"Recomputed", "qwen3", {.remat = "FULL"}}),
                         [](const auto& info) { return info.param.name; });

class Qwen25Vl : public testing::TestWithParam<Variant> {};
TEST_P(Qwen25Vl, GivesTheOutputsAndGradientsOfTheReference) {
  expect_reference(GetParam(), run_decoder<Qwen25VlConfig>);
}

INSTANTIATE_TEST_SUITE_P(Goldens, Qwen25Vl,
                         testing::Values(Variant{"GroupedHeads", "qwen25_vl"}, Variant{"OneHead", "qwen25_vl_one_head"},
                                         Variant{"WithoutKernels", "qwen25_vl", {}, false}),
                         [](const auto& info) { return info.param.name; });

/// Returns the existing parameter if one is created again under the same name.
Scope::Source once_per_name() {
  return [params = std::make_shared<NamedTensors>()](const Scope& below, Param p) {
    Tensor& t = (*params)[p.path];
    return t ? t : t = below.resolve(std::move(p));
  };
}

/// Runs the texts with the golden's images.
NamedTensors run_qwen_vision(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = Qwen25VlConfig::from_json(json);
  const Scope of_images = s.with_source(once_per_name());
  std::vector<ImageInText> images;
  const bool two = config.num_hidden_layers == 2;
  int64_t next = two ? 3 : 1;  // tokens before the first image, then two between the images
  for (const char* name : {"image0", "image1"}) {
    if (!in[name]) continue;
    const Tensor features = image_in_text(of_images, config, in.at(name));
    images.push_back({features, next});
    next += features.dim(1) * features.dim(2) + 2;
  }
  Tensor x = decoder_hidden_states(s, config, in.at("ids"), {config.num_hidden_layers}, images).front();
  return {{"last", x * broadcast_to(expand_dims(cast(in.at("mask"), x.dtype()), 2), x.dims())}};
}

class QwenVision : public testing::TestWithParam<Variant> {};
TEST_P(QwenVision, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_qwen_vision); }

INSTANTIATE_TEST_SUITE_P(Goldens, QwenVision,
                         testing::Values(Variant{"WindowsThatDivideNoImage", "qwen_vision"},
                                         Variant{"ImageSmallerThanAWindow", "qwen_vision_small"},
                                         Variant{"WithoutKernels", "qwen_vision", {}, false},
                                         Variant{"Recomputed", "qwen_vision", {.remat = "FULL"}}),
                         [](const auto& info) { return info.param.name; });

TEST(QwenVisionConfig, SaysWhatDoesNotFit) {
  nlohmann::json vision = {{"hidden_size", 24}, {"num_heads", 4}};
  EXPECT_NE(error_of([&] {
              QwenVisionConfig::from_json(vision);
            }).find("'hidden_size' is 24, expected a multiple of 4 times 'num_heads' = 4"),
            std::string::npos);
  vision = {{"window_size", 20}};
  EXPECT_NE(error_of([&] { QwenVisionConfig::from_json(vision); }).find("'window_size' is 20, expected 28 or more"),
            std::string::npos);
  for (const auto& [whole, message] :
       {std::pair<nlohmann::json, const char*>{nlohmann::json::object(), "no 'vision_config'"},
        {{{"vision_config", {{"out_hidden_size", 16}}}}, "'out_hidden_size' 16, expected 'hidden_size' = 8192"}}) {
    Graph g;
    ParamTable params;
    const Qwen25VlConfig config = Qwen25VlConfig::from_json(whole);
    const Tensor pixels = full(g, 0, {DType::f32, {1, 28, 28, 3}});
    EXPECT_NE(error_of([&] { image_in_text(Scope(g, params, "m"), config, pixels); }).find(message), std::string::npos);
  }
}

// Weights are exact in bf16; activations have 8 bits.
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
