// Models compared with diffusers and transformers: outputs and all gradients on tiny random configs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/flux2_vae.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/tiny_vae.h"
#include "maxdiffusion/models/tiny_video_vae.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/models/wan_vae.h"
#include "maxdiffusion/nn/repeatable.h"
#include "maxdiffusion/ops/shape.h"
#include "tests/golden/model_case.h"

namespace md {
namespace {

// Tolerance as a multiple of the distance between the reference's float32 run and its float64 run, which the goldens
// hold.
constexpr double kNoiseFloors = 10;

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

NamedTensors run_tiny_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = TinyVaeConfig::from_json(json);
  return {{"latents", tiny_vae_encode(s, config, in.at("pixels"))},
          {"pixels", tiny_vae_decode(s, config, in.at("latents"))}};
}

NamedTensors run_tiny_video_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = TinyVideoVaeConfig::from_json(json);
  return {{"latents", tiny_video_vae_encode(s, config, in.at("pixels"))},
          {"pixels", tiny_video_vae_decode(s, config, in.at("latents"))}};
}

NamedTensors run_flux2_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const Flux2VaeConfig config = Flux2VaeConfig::from_json(json);
  const LatentStatistics of = flux2_vae_statistics(s, config);
  const Posterior p = flux2_vae_encode(s, config, of, in.at("pixels"));
  return {{"mean", p.mean},
          {"logvar", p.logvar},
          {"published", flux2_vae_unpatched(of, in.at("latents"))},
          {"pixels", flux2_vae_decode(s, config, of, in.at("latents"))}};
}

NamedTensors run_wan_vae(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const WanVaeConfig config = WanVaeConfig::from_json(json);
  const Posterior p = wan_vae_encode(s, config, in.at("pixels"));
  return {{"mean", p.mean}, {"logvar", p.logvar}, {"pixels", wan_vae_decode(s, config, in.at("latents"))}};
}

/// The first latent frame, then the next two, decoded; videos are encoded whole.
NamedTensors run_tiny_video_vae_in_chunks(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const auto config = TinyVideoVaeConfig::from_json(json);
  const Tensor latents = in.at("latents");
  const Scope again = repeatable(s);
  MediaState state;
  const Tensor first = tiny_video_vae_decode(again, config, slice_axis(latents, 1, 0, 1), &state),
               rest = tiny_video_vae_decode(again, config, slice_axis(latents, 1, 1, latents.dim(1)), &state);
  return {{"latents", tiny_video_vae_encode(s, config, in.at("pixels"))}, {"pixels", concatenate({first, rest}, 1)}};
}

/// One frame, then one latent frame at a time.
NamedTensors run_wan_vae_in_chunks(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const WanVaeConfig config = WanVaeConfig::from_json(json);
  const Tensor pixels = in.at("pixels"), latents = in.at("latents");
  const Scope again = repeatable(s);
  std::vector<Tensor> means, logvars, frames;
  MediaState encoder, decoder;
  for (int64_t k = 0, at = 0; k < latents.dim(1); ++k) {
    const int64_t end = at + (k ? config.frame_scale() : 1);
    const Posterior p = wan_vae_encode(again, config, slice_axis(pixels, 1, at, end), &encoder);
    means.push_back(p.mean), logvars.push_back(p.logvar);
    frames.push_back(wan_vae_decode(again, config, slice_axis(latents, 1, k, k + 1), &decoder));
    at = end;
  }
  return {{"mean", concatenate(means, 1)}, {"logvar", concatenate(logvars, 1)}, {"pixels", concatenate(frames, 1)}};
}

NamedTensors run_clip(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const ClipTextConfig config = ClipTextConfig::from_json(json);
  const ClipTextOutput y = clip_text(s, config, in.at("ids"));
  NamedTensors out = {{"last", y.last_hidden_state}};
  for (size_t i = 0; i < y.hidden_states.size(); ++i) out[fmt::format("hidden.{}", i)] = y.hidden_states[i];
  out[config.with_projection ? "text_embeds" : "pooled"] = config.with_projection ? y.text_embeds : y.pooled;
  return out;
}

NamedTensors run_clip_vision(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const ClipVisionConfig config = ClipVisionConfig::from_json(json);
  const ClipVisionOutput y = clip_vision(s, config, in.at("pixels"));
  NamedTensors out;
  for (size_t i = 0; i < y.hidden_states.size(); ++i) out[fmt::format("hidden.{}", i)] = y.hidden_states[i];
  out[config.with_projection ? "image_embeds" : "pooled"] = config.with_projection ? y.image_embeds : y.pooled;
  return out;
}

NamedTensors run_t5(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {{"last", t5_encoder(s, T5Config::from_json(json), in.at("ids"), in.at("mask"))}};
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
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "worst at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

/// A model, and the distance between PyTorch's run with bf16 activations (autocast) and its float64 run, as printed by
/// tools/golden/models.py.
struct InBf16 {
  Named model;
  double outputs, gradients, of_all;
};
void PrintTo(const InBf16& n, std::ostream* os) { *os << n.model.name; }

class Bf16 : public testing::TestWithParam<InBf16> {};

// S0-81, S4-13
// The tolerance is twice PyTorch's distance: the order of sums and the places of rounding differ between the two
// programs and between processors (without kernels, with widening kernels, with bf16 products). The worst gradients
// nearly cancel, so rounding determines them; one bias of the Wan autoencoder varied from 0.18 to 0.39.
TEST_P(Bf16, ActivationsGiveOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case(GetParam().model.name);
  const ModelRun run = run_case(c, GetParam().model.forward, {.activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({}), of all {:.2g}\n", out.value, out.name, grads.value,
             grads.name, grads.of_all);
  EXPECT_GT(out.value, 1e-3) << "that is not bf16";
  EXPECT_LE(out.value, 2 * GetParam().outputs) << "worst at " << out.name;
  EXPECT_LE(grads.value, 2 * GetParam().gradients) << "worst at " << grads.name;
  EXPECT_LE(grads.of_all, 2 * GetParam().of_all);
}

// The residual stream and everything added to it are f32: no bf16 rounding in between.
TEST(T5InBf16, RoundsWhatLayersReadAndNotTheResidual) {
  for (const bool gated : {true, false}) {
    const T5Config c{.vocab_size = 16,
                     .d_model = 24,
                     .d_kv = 4,
                     .d_ff = 40,
                     .num_layers = 3,
                     .num_heads = 2,
                     .dense_act_fn = gated ? "gelu_new" : "relu",
                     .is_gated_act = gated};
    Graph g;
    ParamTable table;
    const Shape ids{DType::s32, {2, 5}}, stream{DType::f32, {2, 5, c.d_model}};
    const Tensor y = t5_encoder(Scope(g, table, "text_encoder", {.activations = DType::bf16}), c, g.input("ids", ids),
                                g.input("mask", ids));
    EXPECT_EQ(y.shape(), stream);
    int64_t sums = 0, read = 0;
    const Node* last = nullptr;  // the residual stream
    for (const auto& n : g.nodes()) {
      if (n->outputs.empty() || n->outputs[0].dims != stream.dims) continue;
      const std::string op = n->op->name;
      if (op == "convert" && n->outputs[0].dtype == DType::bf16) {
        ++read;
        EXPECT_NE(n->inputs[0].node(), last) << n->id;
      }
      if (op != "add") continue;
      ++sums;
      EXPECT_EQ(n->outputs[0].dtype, DType::f32) << n->id;
      if (last) {
        EXPECT_EQ(n->inputs[0].node(), last) << n->id;
      }
      const Node& of_layer = *n->inputs[1].node();
      if (std::string(of_layer.op->name) == "convert") {
        EXPECT_EQ(of_layer.inputs[0].dtype(), DType::bf16) << n->id;
        EXPECT_STRNE(of_layer.inputs[0].node()->op->name, "convert") << n->id;
      }
      last = n.get();
    }
    EXPECT_EQ(sums, 2 * c.num_layers);
    EXPECT_EQ(read, 2 * c.num_layers);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Goldens, Model,
    testing::Values(Named{"unet_sdxl", run_unet}, Named{"unet_sd15", run_unet}, Named{"unet_mixed", run_unet},
                    Named{"unet_plain", run_unet}, Named{"unet_no_mid", run_unet},
                    Named{"controlnet_sdxl", run_controlnet}, Named{"controlnet_sd15", run_controlnet},
                    Named{"vae_sd", run_vae}, Named{"vae_no_quant", run_vae}, Named{"vae_no_attention", run_vae},
                    Named{"clip_legacy", run_clip}, Named{"clip_projection", run_clip},
                    Named{"clip_vision", run_clip_vision}, Named{"clip_vision_projection", run_clip_vision},
                    Named{"umt5", run_t5}, Named{"umt5_relu", run_t5}, Named{"umt5_silu", run_t5}, Named{"t5", run_t5},
                    Named{"t5_relu", run_t5}, Named{"vae_flux", run_vae}, Named{"tiny_vae", run_tiny_vae},
                    Named{"taef2", run_tiny_vae}, Named{"taehv", run_tiny_video_vae},
                    Named{"taehv_patched", run_tiny_video_vae}, Named{"flux2_vae", run_flux2_vae},
                    Named{"flux2_vae_narrow", run_flux2_vae}, Named{"wan_vae_21", run_wan_vae},
                    Named{"wan_vae_attention", run_wan_vae}, Named{"wan_vae_image", run_wan_vae},
                    Named{"wan_vae_22", run_wan_vae}, Named{"wan_vae_residual", run_wan_vae}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Goldens, Bf16,
                         testing::Values(InBf16{{"unet_no_mid", run_unet}, 0.0242, 0.233, 0.0359},
                                         InBf16{{"vae_no_attention", run_vae}, 0.00878, 0.0435, 0.0107},
                                         InBf16{{"clip_projection", run_clip}, 0.00626, 0.018, 0.00556},
                                         InBf16{{"clip_vision", run_clip_vision}, 0.00354, 0.0142, 0.00587},
                                         InBf16{{"umt5", run_t5}, 0.0131, 0.104, 0.0512},
                                         InBf16{{"wan_vae_attention", run_wan_vae}, 0.0103, 0.276, 0.0592}),
                         [](const auto& info) { return info.param.model.name; });

class Chunks : public testing::TestWithParam<Named> {};

TEST_P(Chunks, MatchReferenceOutputsAndGradients) {
  const ModelCase c = load_case(GetParam().name);
  const ModelRun run = run_case(c, GetParam().forward);
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "first at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Goldens, Chunks,
                         testing::Values(Named{"wan_vae_21", run_wan_vae_in_chunks},
                                         Named{"wan_vae_residual", run_wan_vae_in_chunks},
                                         Named{"taehv", run_tiny_video_vae_in_chunks}),
                         [](const auto& info) { return info.param.name; });

struct Variant {
  const char* name;
  Named model;
  ScopeOptions options;
};
void PrintTo(const Variant& v, std::ostream* os) { *os << v.name; }

class Repeated : public testing::TestWithParam<Variant> {};

// S0-1, S0-65
TEST_P(Repeated, LayersGiveTheOutputsAndGradientsOfTheReference) {
  const ModelCase c = load_case(GetParam().model.name);
  const ModelRun run = run_case(c, GetParam().model.forward, GetParam().options);
  EXPECT_LE(distance(run.outputs, c.outputs).value, kNoiseFloors * c.noise_floor_outputs);
  const Distance grads = distance(run.grads, c.grads);
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

const Named kUnet = {"unet_no_mid", run_unet}, kUmt5 = {"umt5", run_t5}, kT5 = {"t5", run_t5},
            kVision = {"clip_vision", run_clip_vision};
INSTANTIATE_TEST_SUITE_P(
    Goldens, Repeated,
    testing::Values(Variant{"UnetScanned", kUnet, {.scan_layers = true}},
                    Variant{"UnetRecomputed", kUnet, {.remat = "FULL"}},
                    Variant{"UnetScannedAndRecomputed", kUnet, {.remat = "FULL", .scan_layers = true}},
                    Variant{"Umt5ScannedAndRecomputed", kUmt5, {.remat = "FULL", .scan_layers = true}},
                    Variant{"T5ScannedAndRecomputed", kT5, {.remat = "FULL", .scan_layers = true}},
                    Variant{"Umt5Flash", kUmt5, {.attention = "flash", .flash_min_seq_length = 1}},
                    Variant{"ClipVisionRecomputed", kVision, {.remat = "FULL"}}),
    [](const auto& info) { return info.param.name; });

// The specification's values, and distances on both sides of every edge of the published table.
TEST(RelativePositionBucket, IsThatOfThePublishedModels) {
  const std::map<int64_t, int64_t> rows = {{-511, 15}, {-130, 15}, {-127, 15}, {-64, 14}, {-20, 10}, {-8, 8},
                                           {-7, 7},    {-1, 1},    {0, 0},     {1, 17},   {7, 23},   {8, 24},
                                           {20, 26},   {64, 30},   {127, 31},  {130, 31}, {511, 31}};
  for (const auto& [distance, bucket] : rows) EXPECT_EQ(relative_position_bucket(distance, 32, 128), bucket);
  int64_t last = -1;
  std::vector<int64_t> starts;
  for (int64_t r = 0; r < 512; ++r)
    if (const int64_t b = relative_position_bucket(-r, 32, 128); b != last) starts.push_back(r), last = b;
  EXPECT_EQ(starts, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91}));
}

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
