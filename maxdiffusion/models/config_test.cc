#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"

namespace md {
namespace {

using nlohmann::json;

template <class Config>
std::string refusal(const json& config) {
  try {
    Config::from_json(config);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

TEST(UNetConfig, AttentionHeadDimNamesTheNumberOfHeads) {
  EXPECT_EQ(UNetConfig::from_json({{"attention_head_dim", {5, 10, 20, 20}}}).num_heads,
            (std::vector<int64_t>{5, 10, 20, 20}));
  EXPECT_EQ(UNetConfig::from_json({{"attention_head_dim", 8}}).num_heads, (std::vector<int64_t>(4, 8)));
  EXPECT_EQ(UNetConfig::from_json({{"attention_head_dim", 8}, {"num_attention_heads", 5}}).num_heads,
            (std::vector<int64_t>(4, 5)));
}

TEST(UNetConfig, NullMidBlockMeansNone) {
  EXPECT_FALSE(UNetConfig::from_json({{"mid_block_type", nullptr}}).mid_block_type);
  EXPECT_EQ(UNetConfig::from_json(json::object()).mid_block_type, "UNetMidBlock2DCrossAttn");
}

TEST(UNetConfig, RefusesByNameWhatItDoesNotDo) {
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"class_embed_type", "timestep"},
                                                 {"resnet_time_scale_shift", "scale_shift"},
                                                 {"dual_cross_attention", true},
                                                 {"center_input_sample", true},
                                                 {"encoder_hid_dim", 4096},
                                                 {"conv_in_kernel", 5},
                                                 {"attention_type", "gated"},
                                                 {"mid_block_type", "UNetMidBlock2DSimpleCrossAttn"},
                                                 {"addition_embed_type", "image"},
                                                 {"dropout", 0.1},
                                                 {"never_heard_of", 3},
                                                 {"block_out_channels", {320, "a", 3, 4}},
                                                 {"norm_num_groups", 7},
                                                 {"norm_eps", "small"},
                                                 {"layers_per_block", {1, 2}}}) {
    const std::string message = refusal<UNetConfig>({{key, value}});
    EXPECT_NE(message.find("'" + key + "'"), std::string::npos) << message;
  }
  EXPECT_NE(refusal<UNetConfig>(
                {{"down_block_types", json::array({"AttnDownBlock2D", "DownBlock2D", "DownBlock2D", "DownBlock2D"})}})
                .find("CrossAttnDownBlock2D"),
            std::string::npos);
}

TEST(UNetConfig, AcceptsNeutralValuesAndNotes) {
  EXPECT_EQ(refusal<UNetConfig>({{"_class_name", "UNet2DConditionModel"},
                                 {"class_embed_type", nullptr},
                                 {"conv_in_kernel", 3},
                                 {"resnet_out_scale_factor", 1.0},
                                 {"dropout", 0.0}}),
            "accepted");
}

TEST(UNetConfig, MayBeThatOfAveragesAsTrainersSaveIt) {
  EXPECT_EQ(refusal<UNetConfig>({{"decay", 0.9999},
                                 {"min_decay", 0.0},
                                 {"inv_gamma", 1.0},
                                 {"power", 0.75},
                                 {"optimization_step", 500},
                                 {"update_after_step", 0},
                                 {"use_ema_warmup", false}}),
            "accepted");
}

TEST(VaeConfig, RefusesOtherBlocksAndChannelStatistics) {
  EXPECT_NE(
      refusal<VaeConfig>({{"down_block_types", json::array({"AttnDownEncoderBlock2D"})}}).find("DownEncoderBlock2D"),
      std::string::npos);
  EXPECT_NE(refusal<VaeConfig>({{"latents_mean", {0.1, 0.2}}}).find("'latents_mean'"), std::string::npos);
  EXPECT_NE(refusal<VaeConfig>({{"block_out_channels", {64, 128}}}).find('2'), std::string::npos);
}

TEST(WanVaeConfig, DefaultsToThePublished) {
  const WanVaeConfig c = WanVaeConfig::from_json({{"base_dim", 32}, {"patch_size", nullptr}});
  EXPECT_EQ(c.decoder_base_dim, 32);
  EXPECT_EQ(c.patch_size, 1);
  EXPECT_EQ(c.downscale(), 8);
  EXPECT_EQ(c.frame_scale(), 4);
  EXPECT_EQ(c.latents_mean.size(), 16U);
  EXPECT_EQ(c.latents_std.at(15), 1.9160);
  EXPECT_TRUE(c.clip_output);
  const WanVaeConfig other = WanVaeConfig::from_json({{"decoder_base_dim", 48},
                                                      {"dim_mult", {1, 2}},
                                                      {"temperal_downsample", json::array({true})},
                                                      {"patch_size", 2},
                                                      {"in_channels", 12},
                                                      {"out_channels", 12},
                                                      {"attn_scales", {1, 0.5}},
                                                      {"clip_output", false}});
  EXPECT_EQ(other.decoder_base_dim, 48);
  EXPECT_EQ(other.downscale(), 4);
  EXPECT_EQ(other.frame_scale(), 2);
  EXPECT_EQ(other.attn_scales, (std::vector<double>{1, 0.5}));
  EXPECT_FALSE(other.clip_output);
}

TEST(WanVaeConfig, RefusesByNameWhatItDoesNotDo) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"dropout", 0.1},
                                                                            {"temperal_downsample", {true, true}},
                                                                            {"dim_mult", json::array()},
                                                                            {"dim_mult", {1, 2, 0, 4}},
                                                                            {"num_res_blocks", 0},
                                                                            {"patch_size", 2},
                                                                            {"latents_std", {"a"}},
                                                                            {"never_heard_of", 3}}) {
    const std::string message = refusal<WanVaeConfig>({{key, value}});
    EXPECT_NE(message.find(key == "patch_size" ? "'in_channels' is 3" : "'" + key + "'"), std::string::npos) << message;
  }
}

TEST(ClipTextConfig, TakesTheProjectionFromTheArchitecture) {
  EXPECT_FALSE(ClipTextConfig::from_json({{"architectures", json::array({"CLIPTextModel"})}}).with_projection);
  EXPECT_TRUE(
      ClipTextConfig::from_json({{"architectures", json::array({"CLIPTextModelWithProjection"})}}).with_projection);
  EXPECT_NE(refusal<ClipTextConfig>({{"architectures", json::array({"CLIPModel"})}}).find("CLIPModel"),
            std::string::npos);
  EXPECT_NE(refusal<ClipTextConfig>({{"model_type", "t5"}}).find("model_type"), std::string::npos);
}

TEST(T5Config, ModelTypeSelectsT5OrUmt5) {
  EXPECT_TRUE(T5Config::from_json({{"model_type", "t5"}}).shared_positions);
  EXPECT_TRUE(T5Config::from_json({{"architectures", {"T5EncoderModel"}}}).shared_positions);
  EXPECT_FALSE(T5Config::from_json({{"model_type", "umt5"}}).shared_positions);
  EXPECT_FALSE(T5Config::from_json({{"architectures", {"UMT5EncoderModel"}}}).shared_positions);
  EXPECT_NE(refusal<T5Config>(json::object()).find("'architectures' and 'model_type' are missing"), std::string::npos);
  EXPECT_NE(refusal<T5Config>({{"model_type", "t5"}, {"architectures", {"UMT5EncoderModel"}}}).find("different models"),
            std::string::npos);
}

TEST(T5Config, ReadsTheFeedForwardFromItsNameUnlessItsPartsAreGiven) {
  auto read = [](json j) {
    j["model_type"] = "umt5";
    const T5Config c = T5Config::from_json(j);
    return std::pair(c.is_gated_act, c.dense_act_fn);
  };
  EXPECT_EQ(read(json::object()), std::pair(true, std::string("gelu_new")));
  EXPECT_EQ(read({{"feed_forward_proj", "gated-gelu"}}), std::pair(true, std::string("gelu_new")));
  EXPECT_EQ(read({{"feed_forward_proj", "relu"}}), std::pair(false, std::string("relu")));
  EXPECT_EQ(read({{"feed_forward_proj", "gated-silu"}}), std::pair(true, std::string("silu")));
  EXPECT_EQ(read({{"feed_forward_proj", "gated-gelu"}, {"dense_act_fn", "gelu"}}),
            std::pair(true, std::string("gelu")));
}

TEST(T5Config, RefusesOtherModels) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"model_type", "bert"},
                                                                            {"is_decoder", true},
                                                                            {"architectures", {"CLIPTextModel"}},
                                                                            {"relative_attention_num_buckets", 2},
                                                                            {"d_model", "wide"}}) {
    json config = {{"model_type", "t5"}};
    config[key] = value;
    const std::string message = refusal<T5Config>(config);
    EXPECT_NE(message.find("'" + key + "'"), std::string::npos) << message;
  }
}

TEST(ClipVisionConfig, RefusesOtherModels) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"model_type", "clip_text_model"},
                                                                            {"architectures", {"CLIPTextModel"}},
                                                                            {"image_size", 16},
                                                                            {"image_size", {224, 224}},
                                                                            {"num_attention_heads", 5}}) {
    const std::string message = refusal<ClipVisionConfig>({{key, value}});
    EXPECT_NE(message.find("'" + key + "'"), std::string::npos) << message;
  }
  EXPECT_EQ(ClipVisionConfig::from_json({{"patch_size", 14}}).tokens(), 257);
}

TEST(WanTransformerConfig, HasTheDefaultsOfTheLargestModel) {
  const auto c = WanTransformerConfig::from_json(json::object());
  EXPECT_EQ(c.width(), 5120);
  EXPECT_EQ(c.patch_size, (std::vector<int64_t>{1, 2, 2}));
  EXPECT_EQ(c.out_channels, 16);
  EXPECT_FALSE(c.image_dim || c.added_kv_proj_dim || c.pos_embed_seq_len);
}

TEST(WanTransformerConfig, NullOutChannelsAreThoseOfTheInput) {
  EXPECT_EQ(WanTransformerConfig::from_json({{"in_channels", 9}, {"out_channels", nullptr}}).out_channels, 9);
  EXPECT_EQ(WanTransformerConfig::from_json({{"in_channels", 9}}).out_channels, 16);
}

TEST(WanTransformerConfig, RefusesByNameWhatNoModelCanBe) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{{"patch_size", {2, 2}},
                                                                            {"patch_size", {1, 0, 2}},
                                                                            {"attention_head_dim", 7},
                                                                            {"num_attention_heads", 0},
                                                                            {"num_layers", -1},
                                                                            {"freq_dim", 1},
                                                                            {"ffn_dim", "wide"},
                                                                            {"cross_attn_norm", 1},
                                                                            {"qk_norm", "rms_norm"},
                                                                            {"eps", -1e-6},
                                                                            {"added_kv_proj_dim", 5120},
                                                                            {"pos_embed_seq_len", 514},
                                                                            {"window_size", {-1, -1}}}) {
    const std::string message = refusal<WanTransformerConfig>({{key, value}});
    EXPECT_NE(message.find("'" + key + "'"), std::string::npos) << message;
  }
  EXPECT_NE(refusal<WanTransformerConfig>({{"image_dim", 1280}, {"added_kv_proj_dim", 1280}}).find("5120"),
            std::string::npos);
}

/// The error message of wan_transformer for inputs of these sizes.
std::string refusal_of(const WanTransformerConfig& c, Dims sample, Dims times, Dims text, Dims image = {}) {
  Graph g;
  ParamTable table;
  WanInputs in{.sample = g.input("sample", {DType::f32, std::move(sample)}),
               .timestep = g.input("t", {DType::f32, std::move(times)}),
               .text = g.input("text", {DType::f32, std::move(text)})};
  if (!image.empty()) in.image = g.input("image", {DType::f32, std::move(image)});
  try {
    wan_transformer(Scope(g, table, "transformer"), c, in);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_graph);
    return e.what();
  }
  return "accepted";
}

TEST(WanTransformer, NamesTheInputOfAnotherSize) {
  WanTransformerConfig c{.num_attention_heads = 1,
                         .attention_head_dim = 6,
                         .text_dim = 3,
                         .freq_dim = 4,
                         .ffn_dim = 5,
                         .num_layers = 1,
                         .rope_max_seq_len = 4};
  auto says = [](const std::string& message, const char* part) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 3}), "accepted");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1, 4}, {1, 7, 3}), "accepted");
  says(refusal_of(c, {1, 1, 4, 5, 16}, {1}, {1, 7, 3}), "sample is f32[1,1,4,5,16]");
  says(refusal_of(c, {1, 1, 4, 4, 36}, {1}, {1, 7, 3}), "expected [B, F, H, W, 16]");
  says(refusal_of(c, {1, 1, 4, 10, 16}, {1}, {1, 7, 3}), "rope_max_seq_len of this config is 4");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1, 5}, {1, 7, 3}), "timestep is f32[1,5]");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 4}), "text is f32[1,7,4]");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 3}, {1, 2, 3}), "an image is given");
  c.image_dim = 8;
  c.pos_embed_seq_len = 514;
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 3}), "an image is absent");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 3}, {1, 257, 8}), "expected [1, 514, 8]");
  says(refusal_of(c, {1, 1, 4, 4, 16}, {1}, {1, 7, 3}, {1, 514, 8}), "accepted");
}

}  // namespace
}  // namespace md
