// Block weights of LoRA files: which weight each block has, and how many a model has.
#include "maxdiffusion/lora/lora_blocks.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/models/original_weight_names.h"
#include "maxdiffusion/models/unet2d.h"
#include "tests/lora/models.h"

namespace md {
namespace {

nlohmann::json config_of(const std::string& file) { return parse_json(read_file(golden_path(file))); }

/// "0.1,0.2,…".
std::string numbers(size_t n) {
  std::string out;
  for (size_t i = 1; i <= n; ++i) out += fmt::format("{}{}", i > 1 ? "," : "", 0.1 * static_cast<double>(i));
  return out;
}

TEST(LoraBlocks, OfAUNetAreThoseOfTheOriginalModel) {
  const TracedModels models = traced_models("sdxl");
  const LoraBlocks blocks(models.params, lora_names_of("sdxl"), {"text_encoder", "text_encoder_2"}, false);
  const std::vector<std::string> full = {"BASE", "IN00",  "IN01",  "IN02",  "IN03",  "IN04",  "IN05",
                                         "M00",  "OUT00", "OUT01", "OUT02", "OUT03", "OUT04", "OUT05"},
                                 with_attention = {"BASE", "IN03", "IN05", "M00", "OUT00", "OUT01", "OUT02", "OUT03"};
  const std::map<std::string, std::string> expected = {
      {"conv_in.weight", "IN00"},
      {"time_embedding.linear_2.weight", ""},
      {"down_blocks.0.resnets.0.conv1.weight", "IN01"},
      {"down_blocks.0.downsamplers.0.conv.weight", "IN02"},
      {"down_blocks.1.attentions.0.proj_in.weight", "IN03"},
      {"down_blocks.1.resnets.0.conv_shortcut.weight", "IN03"},
      {"down_blocks.2.attentions.0.transformer_blocks.1.attn1.to_q.weight", "IN05"},
      {"mid_block.resnets.1.conv2.weight", "M00"},
      {"up_blocks.0.attentions.1.transformer_blocks.1.attn2.to_v.weight", "OUT01"},
      {"up_blocks.0.upsamplers.0.conv.weight", "OUT01"},
      {"up_blocks.1.attentions.0.transformer_blocks.0.ff.net.2.weight", "OUT02"},
      {"up_blocks.2.resnets.1.conv1.weight", "OUT05"},
      {"conv_out.weight", ""}};
  for (const auto& order : {full, with_attention}) {
    const auto factors = blocks.factors(numbers(order.size()));
    const auto of = [&](const std::string& block) {
      const auto at = std::ranges::find(order, block);
      return block.empty() ? 1 : at == order.end() ? 0 : 0.1 * static_cast<double>(at - order.begin() + 1);
    };
    for (const auto& [path, block] : expected) EXPECT_NEAR(factors.at("unet").at(path), of(block), 1e-12) << path;
    for (const char* text : {"text_encoder", "text_encoder_2"})
      for (const auto& [path, factor] : factors.at(text)) EXPECT_NEAR(factor, 0.1, 1e-12) << path;
  }
}

TEST(LoraBlocks, MergeScaleTimesBlockWeightTimesTheProduct) {
  const TemporaryFolder folder;
  for (const std::string which : {"sdxl", "sd15"}) {
    const Layout layout = recorded_layout(which, "kohya");
    const TracedModels models = traced_models(which);
    const LoraNames names = lora_names_of(which);
    const LoraBlocks blocks(models.params, names, {"text_encoder", "text_encoder_2"}, false);
    const size_t count = which == "sdxl" ? 14 : 18;
    ScaledLora lora{.file = read_lora(write_layout(layout, folder.path()), LoraTargets(models.params, names)),
                    .scale = 5,  // of none of the weights below
                    .scales = blocks.factors(numbers(count))};
    for (auto& [component, factors] : lora.scales)
      for (auto& [path, factor] : factors) factor *= component == "unet" ? 0.7 : -0.4;
    HostArrays values = models.values;
    merge_loras({lora}, models.params, values);
    const HostArrays matrices = recorded_matrices(which);
    double worst = 0;
    size_t compared = 0;
    for (const auto& [input, factor] : layout.factors.items()) {
      const std::string component = input.substr(0, input.find('/')), path = input.substr(input.find('/') + 1),
                        module = input.substr(0, input.rfind('.'));
      const double by = factor.get<double>() * blocks.factors(numbers(count)).at(component).at(path) *
                        (component == "unet" ? 0.7 : -0.4);
      const HostArray &down = matrices.at(module + "/down"), &up = matrices.at(module + "/up");
      const std::vector<double> before = models.values.at(input).to_doubles(), after = values.at(input).to_doubles(),
                                a = down.to_doubles(), b = up.to_doubles();
      const size_t rank = static_cast<size_t>(down.dims()[0]), rest = a.size() / rank;
      for (size_t i = 0; i < before.size(); ++i) {
        double want = before[i];
        for (size_t r = 0; r < rank; ++r) want += by * b[i / rest * rank + r] * a[r * rest + i % rest];
        worst = std::max(worst, std::abs(after[i] - want));
      }
      ++compared;
    }
    EXPECT_GT(compared, 5u);
    EXPECT_LT(worst, 2e-6) << which;
    // Files that rest, and blocks of weight 0, change nothing.
    HostArrays same = models.values;
    merge_loras({lora}, models.params, same, {true});
    for (const auto& [input, array] : same) EXPECT_EQ(array.data(), models.values.at(input).data()) << input;
    lora.scales = blocks.factors("NONE"), lora.scale = 0;
    merge_loras({lora}, models.params, same);
  }
}

/// The message for a list of one weight.
std::string counts_of(const LoraBlocks& blocks) {
  const std::string text = message_of([&] { blocks.factors("1,1"); });
  const size_t at = text.find("expected ");
  return at == text.npos ? text : text.substr(at + 9);
}

TEST(LoraBlocks, OfPublishedUNetsAreAsManyAsTheWebUIsExtensionTakes) {
  for (const auto& [name, full, attending] : {std::tuple{"unet_sd15", "26 (BASE, IN00,",
                                                         "or 17 (BASE, IN01, IN02, "
                                                         "IN04, IN05, IN07, IN08, "
                                                         "M00, OUT03, OUT04, "
                                                         "OUT05, OUT06, OUT07, "
                                                         "OUT08, OUT09, OUT10, "
                                                         "OUT11)"},
                                              {"unet_sdxl", "20 (BASE, IN00,",
                                               "or 12 (BASE, IN04, IN05, IN07, IN08, "
                                               "M00, OUT00, OUT01, OUT02, OUT03, "
                                               "OUT04, OUT05)"}}) {
    nlohmann::json json = config_of(std::string(name) + "/config.json");
    json["layers_per_block"] = 2;  // as in the published models
    const UNetConfig config = UNetConfig::from_json(json);
    Graph g;
    ParamTable params;
    trace_unet2d(Scope(g, params, "unet"), config);
    const LoraBlocks blocks(params, {.denoisers = {"unet"}, .others = {{"unet", original_unet_names(config)}}}, {},
                            false);
    const std::string text = counts_of(blocks);
    EXPECT_TRUE(text.starts_with(full)) << text;
    EXPECT_NE(text.find(attending), text.npos) << text;
    if (name != std::string("unet_sd15")) continue;
    // The default presets of the extension.
    const auto at = [&](const char* preset, const char* path) { return blocks.factors(preset).at("unet").at(path); };
    EXPECT_EQ(at("OUTALL", "up_blocks.1.attentions.0.proj_in.weight"), 1);
    EXPECT_EQ(at("OUTALL", "mid_block.attentions.0.proj_in.weight"), 0);
    EXPECT_EQ(at("MIDD", "mid_block.attentions.0.proj_in.weight"), 1);
    EXPECT_EQ(at("OUTS", "up_blocks.1.attentions.2.proj_in.weight"), 0);
    EXPECT_EQ(at("OUTS", "up_blocks.2.attentions.1.proj_in.weight"), 1);
    EXPECT_EQ(at("INS", "down_blocks.1.attentions.0.proj_in.weight"), 1);
    EXPECT_EQ(at("INS", "down_blocks.1.attentions.1.proj_in.weight"), 0);
    EXPECT_EQ(at("IND", "down_blocks.1.attentions.1.proj_in.weight"), 1);
    EXPECT_EQ(at("INALL", "conv_in.weight"), 0);
    EXPECT_EQ(at("OUTD", "up_blocks.2.attentions.0.proj_in.weight"), 1);
    EXPECT_EQ(at("ALL", "conv_in.weight"), 1);
    EXPECT_EQ(at("ALL0.5", "conv_in.weight"), 0.5);
  }
}

TEST(LoraBlocks, AreNumbersOrAPreset) {
  const TracedModels models = traced_models("sd15");
  const LoraBlocks blocks(models.params, lora_names_of("sd15"), {"text_encoder"}, false);
  std::string list = numbers(17) + ",R";
  EXPECT_NE(message_of([&] {
              blocks.factors(list);
            }).find("lora_block_weights has 'R'; expected numbers, or one of: ALL, NONE, ALL0.5, INALL, IND, "),
            std::string::npos);
  EXPECT_NE(message_of([&] { blocks.factors("OUTALL"); }).find("lora_block_weights 'OUTALL' are 17; expected 18"),
            std::string::npos);
  EXPECT_NE(message_of([&] { blocks.factors("OUTTALL"); }).find("lora_block_weights 'OUTTALL' are 1; expected 18"),
            std::string::npos);
}

}  // namespace
}  // namespace md
