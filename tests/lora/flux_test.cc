// LoRA files of Flux, whose original tensors combine several weights: every layout changes weights as diffusers' loader
// does, and files written for other programs can be read back. tools/golden/flux_files.py writes the files.
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/flux_weight_names.h"
#include "tests/lora/models.h"

namespace md {
namespace {

std::string lora_path(const std::string& name) { return golden_path("flux/lora/" + name + ".safetensors"); }

/// The transformer and the text encoder of the tiny folder.
struct FluxLora : LoraOverZeros {
  FluxLora() {
    auto config = [](const char* part) {
      return parse_json(read_file(golden_path(std::string("flux/dev/") + part + "/config.json")));
    };
    const auto transformer = FluxTransformerConfig::from_json(config("transformer"));
    names.others["transformer"] = original_flux_names(transformer);
    trace_flux_transformer(Scope(graph, params, "transformer"), transformer);
    trace_clip_text(Scope(graph, params, "text_encoder"), ClipTextConfig::from_json(config("text_encoder")));
  }
  /// Weight changes recorded from diffusers under the prefix `beginning`: "all" is the transformer.
  static HostArrays recorded(const std::string& beginning, const std::string& component, HostArrays out = {}) {
    const SafetensorsReader file = SafetensorsReader::open(lora_path("changes"));
    for (const auto& [name, array] : file.tensors())
      if (name.starts_with(beginning + ".")) out[component + name.substr(beginning.size() + 1)] = array;
    return out;
  }
};

TEST_F(FluxLora, OfEveryLayoutChangesWeightsAsInDiffusers) {
  const HostArrays all = recorded("all", "transformer/");
  EXPECT_EQ(all.size(), 22U);
  for (const char* layout :
       {"diffusers", "toolkit", "kohya_sparse", "kohya_transformer", "comfyui", "comfyui_peft", "original_peft"})
    EXPECT_LE(distance(changes(read(lora_path(layout))), all).value, 1e-6) << layout;
  HostArrays with_clip = all;
  for (const auto& [name, array] : recorded("clip", "text_encoder/"))
    with_clip[name.find("text_model.") != std::string::npos
                  ? name
                  : "text_encoder/text_model." + name.substr(name.find('/') + 1)] = array;
  EXPECT_EQ(with_clip.size(), 26U);
  const Distance kohya = distance(changes(read(lora_path("kohya"))), with_clip);
  EXPECT_LE(kohya.value, 1e-6) << kohya.name;
  const Distance xlabs = distance(changes(read(lora_path("xlabs"))), recorded("xlabs", "transformer/"));
  EXPECT_LE(xlabs.value, 1e-6) << xlabs.name;
}

TEST_F(FluxLora, SplitsTensorsWithTheRanksOfTheirParts) {
  for (const char* layout : {"kohya", "kohya_sparse"}) {
    const LoraFile lora = read(lora_path(layout));
    for (const auto& [path, pair] : lora.pairs.at("transformer")) {
      EXPECT_EQ(pair.rank(), 2) << layout << ": " << path;
      EXPECT_EQ(pair.alpha, 1) << layout << ": " << path;
    }
  }
}

TEST_F(FluxLora, OriginalNamesRoundTrip) {
  const LoraFile lora = read(lora_path("diffusers"));
  const std::string comfyui = folder / "comfyui.safetensors", kohya = folder / "kohya.safetensors";
  write_comfyui_lora(comfyui, lora, names);
  write_kohya_lora(kohya, lora, names, true);
  for (const auto& [file, like, key] :
       {std::tuple(comfyui, "comfyui_peft", "diffusion_model.single_blocks.1.linear1.lora_B.weight"),
        std::tuple(kohya, "kohya_sparse", "lora_unet_single_blocks_1_linear1.lora_up.weight")}) {
    const SafetensorsReader written = SafetensorsReader::open(file),
                            recorded = SafetensorsReader::open(lora_path(like));
    EXPECT_EQ(written.tensors().at(key).dims(), (Dims{112, 8}));
    std::set<std::string> keys, expected;
    for (const auto& [name, array] : written.tensors()) keys.insert(name);
    for (const auto& [name, array] : recorded.tensors()) expected.insert(name);
    EXPECT_EQ(keys, expected);
    expect_equal(read(file), lora);
  }
}

TEST_F(FluxLora, PartsOfATensorRoundTrip) {
  LoraFile lora = read(lora_path("diffusers")), some;
  for (const char* layer : {"to_q", "to_v"}) {
    const std::string path = std::string("single_transformer_blocks.1.attn.") + layer + ".weight";
    some.pairs["transformer"][path] = lora.pairs.at("transformer").at(path);
  }
  auto& first = some.pairs.at("transformer").begin()->second;
  first.alpha = 2;  // another strength than to_v's
  write_comfyui_lora(folder / "some.safetensors", some, names);
  const LoraFile back = read(folder / "some.safetensors");
  ASSERT_EQ(back.pairs.at("transformer").size(), 2U);
  EXPECT_LE(distance(changes(back), changes(some)).value, 1e-6);
}

TEST_F(FluxLora, OfATensorsPartsAloneOrWithHalfAPairIsRefused) {
  HostArrays arrays = SafetensorsReader::open(lora_path("kohya_sparse")).tensors();
  const std::string module = "lora_unet_double_blocks_0_img_attn_qkv.";
  arrays[module + "lora_up.weight"] = rows(arrays.at(module + "lora_up.weight"), 0, 16);
  write_safetensors(folder / "rows.safetensors", arrays);
  EXPECT_NE(message_of([&] {
              read(folder / "rows.safetensors");
            }).find("expected 48 rows, 16 of which are for transformer_blocks.0.attn."),
            std::string::npos);
  arrays.erase(module + "lora_up.weight");
  write_safetensors(folder / "half.safetensors", arrays);
  EXPECT_NE(message_of([&] { read(folder / "half.safetensors"); }).find("without its up matrix"), std::string::npos);
}

}  // namespace
}  // namespace md
