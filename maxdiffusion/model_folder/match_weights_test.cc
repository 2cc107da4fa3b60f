#include "maxdiffusion/model_folder/match_weights.h"

#include <nlohmann/json.hpp>

#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"

namespace md {
namespace {

using nlohmann::json;

struct Case {
  const char *golden, *class_name;
  json change;
  const char *message, *tensor;
};
void PrintTo(const Case& c, std::ostream* os) { *os << c.golden << " " << c.change.dump(); }

class Sizes : public testing::TestWithParam<Case> {
 protected:
  Component component(const json& change) const {
    const std::string folder = std::string(MD_SOURCE_DIR "/tests/golden/") + GetParam().golden;
    json config = parse_json(read_file(folder + "/config.json"));
    config.update(change);
    return {GetParam().class_name, find_model_class(GetParam().class_name)->read(config),
            folder + "/weights.safetensors", "some/config.json", config.dump()};
  }
};

/// Every model class, each with a wrong size in its config. "or more" in a message: the model was not traced to its
/// end.
// P-19
TEST_P(Sizes, ThatWeightsDoNotHaveAreFoundByTheirHeadersAndNamedWithTheConfigsMember) {
  const Component right = component(json::object());
  const SafetensorsReader file = SafetensorsReader::open(right.weights);
  EXPECT_GE(match_weights("part", right, file, right.weights).params().size(), file.tensors().size());
  const Component wrong = component(GetParam().change);
  try {
    match_weights("part", wrong, file, wrong.weights);
    FAIL() << "it fits";
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(text.find("in some/config.json: "), std::string::npos) << text;
    EXPECT_NE(text.find(GetParam().message), std::string::npos) << text;
    EXPECT_NE(text.find(GetParam().tensor), std::string::npos) << text;
    EXPECT_NE(text.find(right.weights), std::string::npos) << text;
    EXPECT_NE(text.find("try: compare the config.json"), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, Sizes,
    testing::Values(
        Case{"unet_sd15",
             "UNet2DConditionModel",
             {{"layers_per_block", 1000}},
             "or more of down_blocks.0.resnets.N, the weights have 1; layers_per_block is 1000",
             "missing: down_blocks.0.resnets.1.norm1.weight"},
        Case{"unet_sd15",
             "UNet2DConditionModel",
             {{"layers_per_block", 2}},
             "it needs 2 of down_blocks.0.resnets.N, the weights have 1; layers_per_block is 2",
             "missing: down_blocks.0.resnets.1.norm1.weight"},
        Case{"unet_sd15",
             "UNet2DConditionModel",
             {{"block_out_channels", {16777216, 8, 16, 16}}},
             "time_embedding.linear_1.weight would be [67108864,16777216], the weights have [32,8]: "
             "block_out_channels[0] is 16777216",
             "'conv_in.weight' is bf16[8,4,3,3]"},
        Case{"unet_sdxl",
             "UNet2DConditionModel",
             {{"transformer_layers_per_block", {1, 1000, 2}}},
             "the weights have 1; transformer_layers_per_block[1] is 1000",
             "missing: down_blocks.1.attentions.0.transformer_blocks.1."},
        Case{"controlnet_sd15",
             "ControlNetModel",
             {{"layers_per_block", 1000}},
             "layers_per_block is 1000",
             "missing: down_blocks.0."},
        Case{"vae_sd",
             "AutoencoderKL",
             {{"layers_per_block", 1000}},
             "or more of encoder.down_blocks.0.resnets.N, the weights have 2; layers_per_block is 1000",
             "missing: encoder.down_blocks.0.resnets.2."},
        Case{"vae_sd",
             "AutoencoderKL",
             {{"latent_channels", 1048576}},
             "post_quant_conv.weight would be [1048576,1048576], the weights have [4,4]: latent_channels is 1048576",
             "'decoder.conv_in.weight' is bf16[16,4,3,3]"},
        Case{"clip_projection",
             "CLIPTextModelWithProjection",
             {{"num_hidden_layers", 900}},
             "the weights have 2; num_hidden_layers is 900",
             "missing: text_model.encoder.layers.2."},
        Case{"clip_projection",
             "CLIPTextModelWithProjection",
             {{"vocab_size", 16777216}},
             "vocab_size is 16777216",
             "token_embedding.weight' is bf16[50,24]"},
        Case{"clip_vision",
             "CLIPVisionModel",
             {{"num_hidden_layers", 900}},
             "the weights have 3; num_hidden_layers is 900",
             "missing: vision_model.encoder.layers.3."},
        Case{"umt5",
             "UMT5EncoderModel",
             {{"num_layers", 1000}},
             "the weights have 3; num_layers is 1000",
             "missing: encoder.block.3."},
        Case{"wan_t2v",
             "WanTransformer3DModel",
             {{"num_layers", 1000}},
             "the weights have 2; num_layers is 1000",
             "missing: blocks.2."},
        Case{"wan_t2v", "WanTransformer3DModel", {{"ffn_dim", 10000000}}, "ffn_dim is 10000000", "blocks.0.ffn.net.0"},
        Case{"wan_vae_21",
             "AutoencoderKLWan",
             {{"num_res_blocks", 1000}},
             "or more of encoder.down_blocks.N",
             "num_res_blocks is 1000"},
        Case{"wan_vae_22",
             "AutoencoderKLWan",
             {{"num_res_blocks", 1000}},
             "the weights have 1; num_res_blocks is 1000",
             "missing: encoder.down_blocks.0.resnets.1."}));

}  // namespace
}  // namespace md
