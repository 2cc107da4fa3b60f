// LoRA files of transformers: names of their layers in other programs, and files written for those programs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/registry.h"
#include "maxdiffusion/ops/random.h"
#include "tests/lora/models.h"

namespace md {
namespace {

struct Transformer {
  std::string name, model, folder;  // its class; under tests/golden
  int64_t width = 0;                // of its tokens
  /// A layer's path, and its names in diffusers, ai-toolkit, ComfyUI and kohya.
  std::string layer;
  std::vector<std::string> modules;
  /// Attention layers, first those that are parts of one original tensor; `comfyui` and `kohya` name that tensor,
  /// `tensors` counts the original tensors of all layers.
  std::vector<std::string> attention;
  std::string comfyui, kohya;
  size_t tensors = 0;
  int64_t parts = 3;  // layers that the named tensor combines
};
void PrintTo(const Transformer& t, std::ostream* os) { *os << t.name; }

struct TransformerLora : LoraOverZeros, testing::WithParamInterface<Transformer> {
  TransformerLora() {
    const ModelClass& c = *find_model_class(GetParam().model);
    const std::any config = c.read(parse_json(read_file(golden_path(GetParam().folder + "/config.json"))));
    names.others["transformer"] = c.weight_names(config);
    c.trace(Scope(graph, params, "transformer"), config);
  }
  /// A pair of rank 2 whose values differ for each layer.
  static LoraPair pair(const std::string& layer) {
    const int64_t width = GetParam().width;
    auto numbers = [&](const char* which, const Dims& dims) {
      HostArray a({DType::f32, dims});
      HostRng(0, layer + which).fill(HostRng::Distribution::normal, 1, 0, a.mutable_view<float>());
      return a;
    };
    return {.down = numbers("down", {2, width}), .up = numbers("up", {width, 2}), .alpha = 1};
  }
  std::string file(const std::string& module, const std::string& down, const std::string& up, const LoraPair& p) {
    HostArray alpha({DType::f32, {}});
    alpha.mutable_view<float>()[0] = 1;
    write_safetensors(folder / "lora.safetensors",
                      {{module + down, p.down}, {module + up, p.up}, {module + ".alpha", alpha}});
    return folder / "lora.safetensors";
  }
};

TEST_P(TransformerLora, IsReadByTheNamesOfEveryProgram) {
  const LoraPair p = pair("output");
  LoraFile expected;
  expected.pairs["transformer"][GetParam().layer + ".weight"] = p;
  for (const std::string& module : GetParam().modules) {
    SCOPED_TRACE(module);
    expect_equal(read(file(module, ".lora_A.weight", ".lora_B.weight", p)), expected);
    expect_equal(read(file(module, ".lora_down.weight", ".lora_up.weight", p)), expected);
  }
}

TEST_P(TransformerLora, WrittenForOtherProgramsHasTheOriginalNamesAndRoundTrips) {
  LoraFile lora;
  for (const std::string& layer : GetParam().attention) lora.pairs["transformer"][layer + ".weight"] = pair(layer);
  write_comfyui_lora(folder / "comfyui.safetensors", lora, names);
  write_kohya_lora(folder / "kohya.safetensors", lora, names, false);
  for (const auto& [path, key] :
       {std::pair(folder / "comfyui.safetensors", "diffusion_model." + GetParam().comfyui + ".lora_B.weight"),
        std::pair(folder / "kohya.safetensors", "lora_unet_" + GetParam().kohya + ".lora_up.weight")}) {
    const SafetensorsReader written = SafetensorsReader::open(path);
    EXPECT_EQ(written.tensors().size(), 3 * GetParam().tensors) << "two matrices and their alpha";
    ASSERT_TRUE(written.tensors().contains(key)) << key;
    EXPECT_EQ(written.tensors().at(key).dims(), (Dims{GetParam().parts * GetParam().width, GetParam().parts * 2}));
    expect_equal(read(path), lora);
    EXPECT_LE(distance(changes(read(path)), changes(lora)).value, 1e-6);
  }
}

TEST_P(TransformerLora, NamesOfPartsCountBeforeThoseOfTheFusedTensor) {
  if (GetParam().parts == 1) return;  // no tensor is fused
  HostArrays split;
  LoraFile expected;
  for (int64_t i = 0; i < GetParam().parts; ++i) {
    const std::string& layer = GetParam().attention[static_cast<size_t>(i)];
    const LoraPair p = pair(layer);
    expected.pairs["transformer"][layer + ".weight"] = {.down = p.down, .up = p.up, .alpha = 2};
    split["transformer." + layer + ".lora_A.weight"] = p.down;
    split["transformer." + layer + ".lora_B.weight"] = p.up;
  }
  HostArrays both = split;
  const int64_t width = GetParam().width, parts = GetParam().parts;
  both["diffusion_model." + GetParam().comfyui + ".lora_A.weight"] = pair("fused").down;
  both["diffusion_model." + GetParam().comfyui + ".lora_B.weight"] = HostArray::of<float>(
      {DType::f32, {parts * width, 2}}, std::vector<float>(static_cast<size_t>(parts * width * 2), 1));
  write_safetensors(folder / "split.safetensors", split);
  write_safetensors(folder / "both.safetensors", both);
  expect_equal(read(folder / "split.safetensors"), expected);
  expect_equal(read(folder / "both.safetensors"), expected);
}

INSTANTIATE_TEST_SUITE_P(
    Lora, TransformerLora,
    testing::Values(
        Transformer{
            "ZImage",
            "ZImageTransformer2DModel",
            "zimage/base/transformer",
            24,
            "layers.0.attention.to_out.0",
            {"transformer.layers.0.attention.to_out.0", "layers.0.attention.to_out.0",
             "diffusion_model.layers.0.attention.to_out.0", "diffusion_model.layers.0.attention.out",
             "layers.0.attention.out", "lora_unet_layers_0_attention_out", "lora_unet_layers_0_attention_to_out_0"},
            {"layers.0.attention.to_q", "layers.0.attention.to_k", "layers.0.attention.to_v",
             "layers.0.attention.to_out.0", "context_refiner.0.attention.to_q", "context_refiner.0.attention.to_k",
             "context_refiner.0.attention.to_v", "context_refiner.0.attention.to_out.0"},
            "layers.0.attention.qkv",
            "context_refiner_0_attention_qkv",
            4},
        Transformer{"Flux2",
                    "Flux2Transformer2DModel",
                    "flux2/base/transformer",
                    32,
                    "transformer_blocks.0.attn.to_add_out",
                    {"transformer.transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.attn.to_add_out",
                     "diffusion_model.transformer_blocks.0.attn.to_add_out",
                     "diffusion_model.double_blocks.0.txt_attn.proj", "double_blocks.0.txt_attn.proj",
                     "lora_unet_double_blocks_0_txt_attn_proj", "lora_unet_transformer_blocks_0_attn_to_add_out"},
                    {"transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k",
                     "transformer_blocks.0.attn.to_v", "transformer_blocks.0.attn.to_out.0",
                     "transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.add_k_proj",
                     "transformer_blocks.1.attn.add_v_proj", "transformer_blocks.1.attn.to_add_out"},
                    "double_blocks.0.img_attn.qkv",
                    "double_blocks_1_txt_attn_qkv",
                    4},
        Transformer{
            "QwenImage",
            "QwenImageTransformer2DModel",
            "qwenimage/base/transformer",
            16,
            "transformer_blocks.1.attn.to_add_out",
            {"transformer.transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.attn.to_add_out",
             "diffusion_model.transformer_blocks.1.attn.to_add_out", "lora_unet_transformer_blocks_1_attn_to_add_out"},
            {"transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_out.0"},
            "transformer_blocks.0.attn.to_q",
            "transformer_blocks_1_attn_to_out_0",
            2,
            1}),
    [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace md
