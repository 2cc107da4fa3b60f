#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
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

TEST(VaeConfig, RefusesOtherBlocksAndChannelStatistics) {
  EXPECT_NE(
      refusal<VaeConfig>({{"down_block_types", json::array({"AttnDownEncoderBlock2D"})}}).find("DownEncoderBlock2D"),
      std::string::npos);
  EXPECT_NE(refusal<VaeConfig>({{"latents_mean", {0.1, 0.2}}}).find("'latents_mean'"), std::string::npos);
  EXPECT_NE(refusal<VaeConfig>({{"block_out_channels", {64, 128}}}).find("2"), std::string::npos);
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

}  // namespace
}  // namespace md
