// Models against diffusers and transformers: outputs and all gradients on tiny random configs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/vae.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

// The reference's own float32 run is at most 1.2e-5 from the float64 run that the goldens hold.
constexpr double kTolerance = 1e-4;

NamedTensors run_unet(const Scope& s, const nlohmann::json& config, NamedTensors& in) {
  UNetInputs inputs{.sample = in.at("sample"),
                    .timestep = in.at("timestep"),
                    .encoder_hidden_states = in.at("encoder_hidden_states"),
                    .text_embeds = in["text_embeds"],
                    .time_ids = in["time_ids"],
                    .mid_residual = in["mid_residual"],
                    .timestep_cond = in["timestep_cond"]};
  for (int i = 0; in.contains(fmt::format("down_residual.{}", i)); ++i)
    inputs.down_residuals.push_back(in[fmt::format("down_residual.{}", i)]);
  return {{"sample", unet2d(s, UNetConfig::from_json(config), inputs)}};
}

NamedTensors run_controlnet(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const ControlResiduals r = controlnet(s, ControlNetConfig::from_json(json),
                                        {.sample = in.at("sample"),
                                         .timestep = in.at("timestep"),
                                         .encoder_hidden_states = in.at("encoder_hidden_states"),
                                         .text_embeds = in["text_embeds"],
                                         .time_ids = in["time_ids"]},
                                        in.at("picture"));
  NamedTensors out = {{"mid", r.mid}};
  for (size_t i = 0; i < r.down.size(); ++i) out[fmt::format("down.{}", i)] = r.down[i];
  return out;
}

NamedTensors run_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const VaeConfig config = VaeConfig::from_json(json);
  const Posterior p = vae_encode(s, config, in.at("pixels"));
  return {{"mean", p.mean}, {"logvar", p.logvar}, {"pixels", vae_decode(s, config, in.at("latents"))}};
}

NamedTensors run_clip(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const ClipTextConfig config = ClipTextConfig::from_json(json);
  const ClipTextOutput y = clip_text(s, config, in.at("ids"));
  NamedTensors out = {{"last", y.last_hidden_state}};
  for (size_t i = 0; i < y.hidden_states.size(); ++i) out[fmt::format("hidden.{}", i)] = y.hidden_states[i];
  out[config.with_projection ? "text_embeds" : "pooled"] = config.with_projection ? y.text_embeds : y.pooled;
  return out;
}

struct Named {
  const char* name;
  Forward forward;
};
void PrintTo(const Named& n, std::ostream* os) { *os << n.name; }

class Model : public testing::TestWithParam<Named> {};

TEST_P(Model, GivesTheOutputsAndGradientsOfTheReference) {
  const ModelCase c = load_case(GetParam().name);
  const ModelRun run = run_case(c, GetParam().forward);
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}; noise floor {:.2g}), gradients {:.2g} ({}; noise floor {:.2g})\n", out.value,
             out.name, c.noise_floor_outputs, grads.value, grads.name, c.noise_floor_gradients);
  EXPECT_LE(out.value, kTolerance) << "first at " << out.name;
  EXPECT_LE(grads.value, kTolerance) << "worst at " << grads.name;
}

class Bf16 : public testing::TestWithParam<Named> {};

// Weights stay f32, activations are bf16 (8 bits): the direction of every gradient must survive. The worst are biases
// whose gradient nearly cancels: 0.09.
TEST_P(Bf16, ActivationsGiveOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case(GetParam().name);
  const ModelRun run = run_case(c, GetParam().forward, {.activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.05) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.2) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Goldens, Model,
                         testing::Values(Named{"unet_sdxl", run_unet}, Named{"unet_sd15", run_unet},
                                         Named{"unet_mixed", run_unet}, Named{"unet_plain", run_unet},
                                         Named{"unet_no_mid", run_unet}, Named{"controlnet_sdxl", run_controlnet},
                                         Named{"controlnet_sd15", run_controlnet}, Named{"vae_sd", run_vae},
                                         Named{"vae_no_quant", run_vae}, Named{"vae_no_attention", run_vae},
                                         Named{"clip_legacy", run_clip}, Named{"clip_projection", run_clip}),
                         [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Goldens, Bf16,
                         testing::Values(Named{"unet_no_mid", run_unet}, Named{"vae_no_attention", run_vae},
                                         Named{"clip_projection", run_clip}),
                         [](const auto& info) { return info.param.name; });

struct Variant {
  const char* name;
  ScopeOptions options;
};
void PrintTo(const Variant& v, std::ostream* os) { *os << v.name; }

class Repeated : public testing::TestWithParam<Variant> {};

TEST_P(Repeated, LayersGiveTheOutputsAndGradientsOfTheReference) {
  const ModelCase c = load_case("unet_no_mid");
  const ModelRun run = run_case(c, run_unet, GetParam().options);
  EXPECT_LE(distance(run.outputs, c.outputs).value, kTolerance);
  const Distance grads = distance(run.grads, c.grads);
  EXPECT_LE(grads.value, kTolerance) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Unet, Repeated,
                         testing::Values(Variant{"Scanned", {.scan_layers = true}},
                                         Variant{"Recomputed", {.remat = "FULL"}},
                                         Variant{"LinearKept", {.remat = "MATMUL_WITHOUT_BATCH", .scan_layers = true}},
                                         Variant{"ScannedAndRecomputed", {.remat = "FULL", .scan_layers = true}}),
                         [](const auto& info) { return info.param.name; });

TEST(Weights, SavedAndLoadedGiveTheSameBits) {
  ModelCase c = load_case("vae_no_attention");
  const ModelRun before = run_case(c, run_vae);
  const std::string folder = testing::TempDir() + "md_golden_weights";
  std::filesystem::create_directories(folder);
  // Small shards, so that the index is used.
  write_sharded_safetensors(folder, "diffusion_pytorch_model", c.weights, 4096);
  c.weights = SafetensorsReader::open(folder).tensors();
  const ModelRun after = run_case(c, run_vae);
  EXPECT_EQ(distance(after.outputs, before.outputs).value, 0);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace md
