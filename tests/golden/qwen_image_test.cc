// QwenImageTransformer2DModel and AutoencoderKLQwenImage compared with diffusers: outputs and all gradients on tiny
// random configs, for every way to run blocks.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/models/qwen_image_transformer.h"
#include "maxdiffusion/models/wan_vae.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

/// Rows and columns of tokens, which the goldens do not record.
std::pair<int64_t, int64_t> tokens_of(const QwenImageTransformerConfig& c) {
  if (c.num_layers == 2) return {3, 4};
  return c.num_layers == 3 ? std::pair<int64_t, int64_t>{7, 5} : std::pair<int64_t, int64_t>{6, 1};
}

NamedTensors run_qwen_image(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = QwenImageTransformerConfig::from_json(json);
  const auto [rows, columns] = tokens_of(config);
  std::vector<QwenImageTokens> references;
  if (Tensor first = in["reference0"]) references = {{first, 5, 4}, {in.at("reference1"), 2, 3}};
  return {{"sample", qwen_image_transformer(s, config,
                                            {.sample = in.at("sample"),
                                             .rows = rows,
                                             .columns = columns,
                                             .timestep = in.at("timestep"),
                                             .text = in.at("text"),
                                             .lengths = in.at("lengths"),
                                             .references = references})}};
}

/// Runs it as an image autoencoder. Traces the whole model first, because files also hold the parameters that only
/// videos use.
NamedTensors run_qwen_image_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = QwenImageVaeConfig::from_json(json);
  std::map<std::string, Tensor> params;  // a scope returns each parameter once
  Scope again = s.with_source([&params](const Scope& below, Param p) {
    Tensor& t = params[p.path];
    return t ? t : t = below.resolve(std::move(p));
  });
  trace_wan_vae(again, config);
  const std::shared_ptr<const Autoencoder> vae = wan_autoencoder(config);
  const Models models = [&again](const std::string&) { return again; };
  EXPECT_EQ(vae->frame_scale, 0);
  const Posterior p = vae->encode(models, in.at("pixels"), nullptr);
  return {{"mean", p.mean}, {"logvar", p.logvar}, {"pixels", vae->decode(models, in.at("latents"), nullptr)}};
}

class QwenImageTransformer : public testing::TestWithParam<Variant> {};
TEST_P(QwenImageTransformer, GivesTheOutputsAndGradientsOfTheReference) {
  expect_reference(GetParam(), run_qwen_image);
}

INSTANTIATE_TEST_SUITE_P(
    Goldens, QwenImageTransformer,
    testing::Values(Variant{"TextsOfTwoLengths", "qwen_image"}, Variant{"OddSizes", "qwen_image_odd"},
                    Variant{"TextsThatFillTheirRoom", "qwen_image_full"}, Variant{"References", "qwen_image_edit"},
                    Variant{"ReferencesAtTimeZero", "qwen_image_edit_zero"},
                    Variant{"ReferencesScanned", "qwen_image_edit_zero", {.remat = "FULL", .scan_layers = true}},
                    Variant{"WithoutKernels", "qwen_image_odd", {}, false},
                    Variant{"ScannedAndRecomputed", "qwen_image", {.remat = "FULL", .scan_layers = true}},
                    Variant{"ScannedAndOptimized", "qwen_image_odd", {.remat = "FLUX_OPTIMIZED", .scan_layers = true}},
                    Variant{"Flash", "qwen_image", {.attention = "flash", .flash_min_seq_length = 1}, false}),
    [](const auto& info) { return info.param.name; });

class QwenImageVae : public testing::TestWithParam<Variant> {};
TEST_P(QwenImageVae, GivesTheOutputsAndGradientsOfTheReference) { expect_reference(GetParam(), run_qwen_image_vae); }

INSTANTIATE_TEST_SUITE_P(Goldens, QwenImageVae,
                         testing::Values(Variant{"FourLevels", "qwen_image_vae"},
                                         Variant{"AttentionInTheEncoder", "qwen_image_vae_attention"}),
                         [](const auto& info) { return info.param.name; });

// Weights are exact in bf16; activations have 8 bits, except those in f32: the time embedding, norms, modulation, the
// last projection.
TEST(QwenImageInBf16, GivesOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case("qwen_image");
  const ModelRun run = run_case(c, run_qwen_image, {.weights = DType::bf16, .activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.02) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.1) << "worst at " << grads.name;
}

// The prediction depends neither on padding after a text nor on its length.
TEST(QwenImage, ReadsNothingBehindATextsTokens) {
  const ModelCase c = load_case("qwen_image_odd");
  ModelCase other = c;
  HostArray text(c.inputs.at("text").shape());
  std::copy_n(c.inputs.at("text").data(), text.bytes(), text.mutable_data());
  auto v = text.mutable_view<float>();
  const size_t room = 16, features = 6;
  const size_t lengths[] = {1, 6, 3};
  for (size_t b = 0; b < 3; ++b)
    for (size_t i = lengths[b] * features; i < room * features; ++i) v[b * room * features + i] = 100;
  other.inputs["text"] = text;
  other.dots = c.dots;
  const HostArrays got = run_case(other, run_qwen_image).outputs, want = run_case(c, run_qwen_image).outputs;
  EXPECT_EQ(got.at("sample").to_doubles(), want.at("sample").to_doubles());
}

}  // namespace
}  // namespace md
