#include "maxdiffusion/checkpoint/diffusers_layout.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

using Json = nlohmann::json;

TEST(DiffusersLayout, ModelIndexNamesEveryComponent) {
  Json j = Json::parse(model_index_json("StableDiffusionXLPipeline", sdxl_components("EulerDiscreteScheduler"),
                                        R"({"force_zeros_for_empty_prompt": true})"));
  EXPECT_EQ(j["_class_name"], "StableDiffusionXLPipeline");
  EXPECT_EQ(j["unet"], (Json{"diffusers", "UNet2DConditionModel"}));
  EXPECT_EQ(j["scheduler"], (Json{"diffusers", "EulerDiscreteScheduler"}));
  EXPECT_EQ(j["text_encoder_2"], (Json{"transformers", "CLIPTextModelWithProjection"}));
  EXPECT_EQ(j["image_encoder"], (Json{nullptr, nullptr}));
  EXPECT_EQ(j["force_zeros_for_empty_prompt"], true);
}

TEST(DiffusersLayout, AConfigKeepsItsMembers) {
  Json j =
      Json::parse(component_config_json("EulerDiscreteScheduler", R"({"beta_start": 0.00085, "_class_name": "x"})"));
  EXPECT_EQ(j["_class_name"], "EulerDiscreteScheduler");
  EXPECT_EQ(j["beta_start"], 0.00085);
  EXPECT_THROW(component_config_json("X", "[1]"), Error);
  EXPECT_THROW(component_config_json("X", "{"), Error);
}

}  // namespace
}  // namespace md
