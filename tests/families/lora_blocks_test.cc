// Block weights of LoRA files for transformers: how many a model has, and which.
#include "maxdiffusion/lora/lora_blocks.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/families/loras.h"
#include "maxdiffusion/families/open_model.h"

namespace md {
namespace {

std::string golden(const std::string& folder) { return MD_SOURCE_DIR "/tests/golden/" + folder; }

/// The message for a list of one weight.
std::string counts_of(const LoraBlocks& blocks) {
  const std::string text = [&] {
    try {
      blocks.factors("1,1");
    } catch (const Error& e) {
      return e.message();
    }
    return std::string();
  }();
  const size_t at = text.find("expected ");
  return at == text.npos ? text : text.substr(at + 9);
}

TEST(LoraBlocksOfFamilies, OfTransformersAreCountedFromTheModel) {
  for (const auto& [folder, count] : std::map<std::string, std::string>{
           {"flux/dev",
            "8 (text_encoder, text_encoder_2, the layers before, 2 transformer_blocks, 2 "
            "single_transformer_blocks, the layers behind)"},
           {"flux2/base", "5 (BASE, 2 transformer_blocks, 2 single_transformer_blocks)"},
           {"qwenimage/base", "3 (BASE, 2 transformer_blocks)"},
           {"wan/t2v", "3 (BASE, 2 blocks)"},
           {"wan/a14b", "3 (BASE, 2 blocks)"},
           {"zimage/base", "5 (BASE, 1 noise_refiner, 1 context_refiner, 2 layers)"}}) {
    ModelKeys keys;
    if (folder.starts_with("flux2")) keys.text_encoder_out_layers = {1, 2, 3};
    const OpenedModel model = open_model(golden(folder), keys, {.purpose = Purpose::sampling});
    const LoraBlocks blocks(model.folder.params(lora_components(*model.family)),
                            lora_names(model.folder, *model.family), model.family->spec().text_components(),
                            model.family->spec().lora.ends_are_blocks);
    EXPECT_EQ(counts_of(blocks), count) << folder;
  }
}

TEST(LoraBlocksOfFamilies, OfFluxAreInTheOrderOfTheWebUIsExtension) {
  const ModelFolder opened = ModelFolder::open(golden("flux/dev"));
  const auto family = make_family(opened);
  const LoraBlocks blocks(opened.params(lora_components(*family)), lora_names(opened, *family),
                          family->spec().text_components(), family->spec().lora.ends_are_blocks);
  const auto factors = blocks.factors("1,2,3,4,5,6,7,8");
  for (const auto& [path, factor] : factors.at("text_encoder")) EXPECT_EQ(factor, 1) << path;
  for (const auto& [path, factor] : factors.at("text_encoder_2")) EXPECT_EQ(factor, 2) << path;
  for (const auto& [path, factor] :
       std::map<std::string, double>{{"x_embedder.weight", 3},
                                     {"context_embedder.weight", 3},
                                     {"time_text_embed.guidance_embedder.linear_1.weight", 3},
                                     {"time_text_embed.text_embedder.linear_2.weight", 3},
                                     {"transformer_blocks.0.attn.to_q.weight", 4},
                                     {"transformer_blocks.1.ff.net.2.weight", 5},
                                     {"single_transformer_blocks.0.proj_mlp.weight", 6},
                                     {"single_transformer_blocks.1.attn.to_k.weight", 7},
                                     {"norm_out.linear.weight", 8},
                                     {"proj_out.weight", 8}})
    EXPECT_EQ(factors.at("transformer").at(path), factor) << path;
}

}  // namespace
}  // namespace md
