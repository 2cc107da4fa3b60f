// LoRA files of Z-Image: the names that other programs give to its layers, and what is written for them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "maxdiffusion/models/z_image_weight_names.h"
#include "maxdiffusion/ops/random.h"
#include "tests/lora/models.h"

namespace md {
namespace {

struct ZImageLora : LoraOverZeros {
  ZImageTransformerConfig config =
      ZImageTransformerConfig::from_json(parse_json(read_file(golden_path("zimage/base/transformer/config.json"))));

  ZImageLora() {
    names.others["transformer"] = original_z_image_names(config);
    trace_z_image_transformer(Scope(graph, params, "transformer"), config);
  }
  /// Of rank 2, other numbers for each layer.
  LoraPair pair(const std::string& layer) const {
    auto numbers = [&](const char* which, const Dims& dims) {
      HostArray a({DType::f32, dims});
      HostRng(0, layer + which).fill(HostRng::Distribution::normal, 1, 0, a.mutable_view<float>());
      return a;
    };
    return {.down = numbers("down", {2, config.dim}), .up = numbers("up", {config.dim, 2}), .alpha = 1};
  }
  /// The attention of a layer and of a refiner.
  LoraFile attention() const {
    LoraFile lora;
    for (const char* block : {"layers.0", "context_refiner.0"})
      for (const char* layer : {"to_q", "to_k", "to_v", "to_out.0"}) {
        const std::string name = fmt::format("{}.attention.{}", block, layer);
        lora.pairs["transformer"][name + ".weight"] = pair(name);
      }
    return lora;
  }
  std::string file(const std::string& module, const std::string& down, const std::string& up, const LoraPair& p) {
    HostArray alpha({DType::f32, {}});
    alpha.mutable_view<float>()[0] = 1;
    write_safetensors(folder / "lora.safetensors",
                      {{module + down, p.down}, {module + up, p.up}, {module + ".alpha", alpha}});
    return folder / "lora.safetensors";
  }
};

TEST_F(ZImageLora, IsReadByTheNamesOfEveryProgram) {
  const LoraPair p = pair("output");
  LoraFile expected;
  expected.pairs["transformer"]["layers.0.attention.to_out.0.weight"] = p;
  for (const char* module : {"transformer.layers.0.attention.to_out.0", "layers.0.attention.to_out.0",  // diffusers
                             "diffusion_model.layers.0.attention.to_out.0",                             // ai-toolkit
                             "diffusion_model.layers.0.attention.out", "layers.0.attention.out",        // ComfyUI
                             "lora_unet_layers_0_attention_out", "lora_unet_layers_0_attention_to_out_0"}) {  // kohya
    SCOPED_TRACE(module);
    expect_equal(read(file(module, ".lora_A.weight", ".lora_B.weight", p)), expected);
    expect_equal(read(file(module, ".lora_down.weight", ".lora_up.weight", p)), expected);
  }
}

TEST_F(ZImageLora, WrittenForOtherProgramsHasTheOriginalNamesAndRoundTrips) {
  const LoraFile lora = attention();
  write_comfyui_lora(folder / "comfyui.safetensors", lora, names);
  write_kohya_lora(folder / "kohya.safetensors", lora, names, false);
  for (const auto& [path, key] :
       {std::pair(folder / "comfyui.safetensors", "diffusion_model.layers.0.attention.qkv.lora_B.weight"),
        std::pair(folder / "kohya.safetensors", "lora_unet_context_refiner_0_attention_qkv.lora_up.weight")}) {
    const SafetensorsReader written = SafetensorsReader::open(path);
    EXPECT_EQ(written.tensors().size(), 2U * 2 * 3) << "two layers of two blocks, two matrices and their alpha";
    EXPECT_EQ(written.tensors().at(key).dims(), (Dims{3 * config.dim, 6}));
    expect_equal(read(path), lora);
    EXPECT_LE(distance(changes(read(path)), changes(lora)).value, 1e-6);
  }
}

}  // namespace
}  // namespace md
