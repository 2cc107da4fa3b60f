// LoRA files for transformers: names of the original program, differences of whole parameters, and two denoisers that
// share all names.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_weight_names.h"
#include "tests/lora/models.h"

namespace md {
namespace {

using nlohmann::json;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// An array with the values 1/8, 2/8, ….
HostArray counted(const Dims& dims) {
  HostArray out(Shape{DType::f32, dims});
  float n = 0;
  for (float& v : out.mutable_view<float>()) v = ++n / 8;
  return out;
}

/// Two transformers of the same sizes with all-zero weights: after merging, the weights are what files add.
struct TransformerLora : testing::Test {
  Graph graph;
  ParamTable params;
  HostArrays zeros;
  LoraNames names{.denoisers = {"transformer", "transformer_2"},
                  .others = {{"transformer", original_wan_names({})}, {"transformer_2", original_wan_names({})}}};
  TemporaryFolder folder;

  TransformerLora() {
    const auto config = WanTransformerConfig::from_json({{"num_attention_heads", 2},
                                                         {"attention_head_dim", 4},
                                                         {"in_channels", 4},
                                                         {"out_channels", 4},
                                                         {"text_dim", 6},
                                                         {"freq_dim", 8},
                                                         {"ffn_dim", 16},
                                                         {"num_layers", 2},
                                                         {"rope_max_seq_len", 32}});
    for (const std::string& name : names.denoisers) trace_wan_transformer(Scope(graph, params, name), config);
    for (const Param& p : params.params()) zeros[p.input] = zeros_like(HostArray(p.shape));
  }
  std::string file(const HostArrays& arrays, const std::map<std::string, std::string>& metadata = {}) {
    write_safetensors(folder / "lora.safetensors", arrays, metadata);
    return folder / "lora.safetensors";
  }
  LoraFile read(const HostArrays& arrays, const std::map<std::string, std::string>& metadata = {},
                const std::string& denoiser = "") {
    return read_lora(file(arrays, metadata), LoraTargets(params, names), denoiser);
  }
  std::string refusal(const HostArrays& arrays) {
    return message_of([&] { read(arrays); });
  }
  /// A pair for the output projection of a block's cross attention, under this module's name.
  static HostArrays pair(const std::string& module, const std::string& down = "lora_A",
                         const std::string& up = "lora_B") {
    return {{module + "." + down + ".weight", counted({2, 8})}, {module + "." + up + ".weight", counted({8, 2})}};
  }
  /// Component and path of the only weight for which a file has matrices.
  static std::string only(const LoraFile& f) {
    if (f.pairs.size() != 1 || f.pairs.begin()->second.size() != 1) return summary(f);
    return f.pairs.begin()->first + "/" + f.pairs.begin()->second.begin()->first;
  }
};

// S2-98
TEST_F(TransformerLora, IsFoundByEveryName) {
  const std::string path = "blocks.1.attn2.to_out.0.weight";
  for (const char* module :
       {"transformer.blocks.1.attn2.to_out.0", "blocks.1.attn2.to_out.0", "base_model.model.blocks.1.attn2.to_out.0",
        "diffusion_model.blocks.1.cross_attn.o", "model.diffusion_model.blocks.1.cross_attn.o", "blocks.1.cross_attn.o",
        "base_model.model.blocks.1.cross_attn.o", "lora_unet_blocks_1_cross_attn_o",
        "lora_unet_blocks_1_attn2_to_out_0"}) {
    EXPECT_EQ(only(read(pair(module))), "transformer/" + path) << module;
    EXPECT_EQ(only(read(pair(module, "lora_down", "lora_up"))), "transformer/" + path) << module;
    EXPECT_EQ(only(read(pair(module), {}, "transformer_2")), "transformer_2/" + path) << module;
    EXPECT_EQ(only(read(pair(module), {{"component", "transformer_2"}})), "transformer_2/" + path) << module;
    EXPECT_EQ(only(read(pair(module), {{"component", "transformer_2"}}, "transformer")), "transformer/" + path);
  }
  for (const char* requested : {"", "transformer", "transformer_2"})
    EXPECT_EQ(only(read(pair("transformer_2.blocks.1.attn2.to_out.0"), {}, requested)), "transformer_2/" + path);
  EXPECT_TRUE(contains(refusal(pair("transformer_3.blocks.1.attn2.to_out.0")), "have no place"));
  EXPECT_TRUE(contains(refusal(pair("diffusion_model.blocks.2.cross_attn.o")), "have no place"));
}

TEST_F(TransformerLora, TakesItsAlphaFromTheMetadataOfEitherDenoiser) {
  const std::map<std::string, std::string> metadata = {
      {"lora_adapter_metadata", R"({"transformer.r": 2, "transformer.lora_alpha": 6})"}};
  for (const char* requested : {"transformer", "transformer_2"}) {
    const LoraFile f = read(pair("transformer.blocks.1.attn2.to_out.0"), metadata, requested);
    EXPECT_EQ(f.pairs.at(requested).begin()->second.alpha, 6);
  }
}

TEST_F(TransformerLora, OfImageToVideoIsUsedWithoutItsImageInput) {
  const std::string block = "diffusion_model.blocks.1.cross_attn.";
  HostArrays all = pair(block + "o");
  for (const char* module : {"k_img", "v_img"}) all.merge(pair(block + module));
  all[block + "k_img.diff_b"] = all[block + "norm_k_img.diff"] = counted({8});
  const LoraFile rest = read(pair(block + "o")), lora = read(all);
  EXPECT_EQ(only(lora), "transformer/blocks.1.attn2.to_out.0.weight");
  EXPECT_TRUE(lora.differences.empty() && lora.adapters.empty());
  EXPECT_EQ(lora.pairs.begin()->second.begin()->second.up.to_doubles(),
            rest.pairs.begin()->second.begin()->second.up.to_doubles());
  EXPECT_TRUE(contains(refusal(pair("diffusion_model.blocks.1.self_attn.k_img")), "have no place"));
}

TEST_F(TransformerLora, OfAnotherModelIsUsedWhereItHasAPlaceIfAsked) {
  const std::string block = "diffusion_model.blocks.1.cross_attn.", far = "diffusion_model.blocks.1.gate.";
  HostArrays all = pair(block + "o");
  for (const char* module : {"q", "k"}) all.merge(pair(far + module));
  const auto with = [&](const HostArrays& arrays, MissingKeys missing) {
    return read_lora(file(arrays), LoraTargets(params, names), "", missing);
  };
  const std::string message = refusal(all);
  EXPECT_TRUE(contains(message, "4 of 6 keys have no place") && contains(message, "try: lora_missing_keys=warn"))
      << message;
  testing::internal::CaptureStderr();
  const LoraFile lora = with(all, MissingKeys::left_out);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "4 of 6 keys have no place in this model and are left out: " + far + "k.lora_A")) << log;
  EXPECT_EQ(only(lora), "transformer/blocks.1.attn2.to_out.0.weight");
  EXPECT_EQ(lora.pairs.begin()->second.begin()->second.up.to_doubles(), counted({8, 2}).to_doubles());
  // A file of which nothing has a place is of another model.
  const std::string none = message_of([&] { with(pair(far + "q"), MissingKeys::left_out); });
  EXPECT_TRUE(contains(none, "2 of 2 keys have no place") && !contains(none, "lora_missing_keys")) << none;
}

// As diffusers 0.42 loads them: Wan, FLUX.1 and SDXL, in its layout, kohya's and ComfyUI's.
TEST_F(TransformerLora, OfMoreBlocksIsUsedInThoseOfTheModel) {
  for (const std::string beginning : {"diffusion_model.blocks.", "lora_unet_blocks_", "transformer.blocks."}) {
    const bool kohya = beginning.ends_with('_');
    const auto module = [&](int block) {
      return beginning + std::to_string(block) + (kohya ? "_cross_attn_o" : ".cross_attn.o");
    };
    HostArrays all = pair(module(1), "lora_down", "lora_up");
    all.merge(pair(module(7), "lora_down", "lora_up"));
    all[module(7) + ".alpha"] = counted({1});
    testing::internal::CaptureStderr();
    EXPECT_EQ(only(read(all)), "transformer/blocks.1.attn2.to_out.0.weight") << beginning;
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(contains(
        log, "3 of 5 keys are left out, as diffusers does: this model has no such layers: " + module(7) + ".alpha"))
        << log;
    all.merge(pair(beginning + (kohya ? "1_gate" : "1.gate")));
    if (beginning.starts_with("transformer.")) {  // under its own names diffusers leaves out any layer
      EXPECT_EQ(only(read(all)), "transformer/blocks.1.attn2.to_out.0.weight");
      continue;
    }
    const std::string message = refusal(all);
    EXPECT_TRUE(contains(message, "5 of 7 keys have no place") && contains(message, module(7))) << message;
  }
  // Nothing is left: the file is for another model.
  const std::string message = refusal(pair("transformer.blocks.7.attn2.to_out.0"));
  EXPECT_TRUE(contains(message, "2 of 2 keys have no place")) << message;
}

TEST_F(TransformerLora, OfPatchesMayBeFlat) {
  for (const Dims& down : {Dims{3, 4, 1, 2, 2}, Dims{3, 16}})
    for (const Dims& up : {Dims{8, 3, 1, 1, 1}, Dims{8, 3}}) {
      const LoraFile f = read({{"diffusion_model.patch_embedding.lora_down.weight", counted(down)},
                               {"diffusion_model.patch_embedding.lora_up.weight", counted(up)}});
      HostArrays values = zeros;
      merge_loras({{f, 2}}, params, values);
      const HostArray& w = values.at("transformer/patch_embedding.weight");
      ASSERT_EQ(w.dims(), (Dims{8, 4, 1, 2, 2}));
      // Row 1 of up is 4, 5, 6 eighths; column 15 of down is 16, 32, 48 eighths.
      EXPECT_EQ(w.to_doubles()[31], 2 * (4 * 16 + 5 * 32 + 6 * 48) / 64.0);
    }
}

TEST_F(TransformerLora, AddsDifferencesToWeightsBiasesAndModulations) {
  const std::vector<std::pair<std::string, std::string>> all = {
      {"diffusion_model.head.head.diff", "proj_out.weight"},
      {"diffusion_model.head.head.diff_b", "proj_out.bias"},
      {"diffusion_model.head.diff_m", "scale_shift_table"},
      {"diffusion_model.blocks.1.diff_m", "blocks.1.scale_shift_table"},
      {"diffusion_model.blocks.0.modulation.diff", "blocks.0.scale_shift_table"},
      {"diffusion_model.blocks.0.norm3.diff", "blocks.0.norm2.weight"},
      {"diffusion_model.blocks.0.norm3.diff_b", "blocks.0.norm2.bias"},
      {"diffusion_model.blocks.0.self_attn.norm_k.diff", "blocks.0.attn1.norm_k.weight"},
      {"diffusion_model.patch_embedding.diff", "patch_embedding.weight"},
      {"diffusion_model.text_embedding.2.diff_b", "condition_embedder.text_embedder.linear_2.bias"},
      {"lora_unet_blocks_1_ffn_0.diff_b", "blocks.1.ffn.net.0.proj.bias"},
      {"transformer.blocks.1.attn1.to_q.diff", "blocks.1.attn1.to_q.weight"}};
  HostArrays arrays;
  for (const auto& [key, path] : all) arrays[key] = counted(params.find("transformer/" + path)->shape.dims);
  const LoraFile first = read(arrays), second = read(arrays, {}, "transformer_2");
  EXPECT_EQ(summary(first), "12 differences of transformer");
  HostArrays values = zeros;
  merge_loras({{first, 0.5}, {first, -2}, {second, 4}}, params, values);
  std::set<std::string> changed;
  for (const auto& [key, path] : all)
    for (const auto& [component, factor] : {std::pair("transformer/", -1.5), {"transformer_2/", 4.0}}) {
      const HostArray& v = values.at(component + path);
      for (size_t i = 0; i < v.to_doubles().size(); ++i)
        ASSERT_EQ(v.to_doubles()[i], factor * static_cast<double>(i + 1) / 8) << component << path;
      changed.insert(component + path);
    }
  for (const auto& [input, v] : values)
    if (!changed.contains(input)) {
      EXPECT_EQ(v.data(), zeros.at(input).data()) << input;
    }
}

TEST_F(TransformerLora, DifferencesThatDoNotFitAreRefused) {
  const std::string bias = "diffusion_model.blocks.0.self_attn.q.diff_b";
  const std::string message = refusal({{bias, counted({9})}});
  EXPECT_TRUE(contains(message, bias) && contains(message, "[9]") && contains(message, "[8]")) << message;
  EXPECT_TRUE(contains(refusal({{bias, counted({8})}, {"transformer.blocks.0.attn1.to_q.diff_b", counted({8})}}),
                       "are both for blocks.0.attn1.to_q.bias"));
  EXPECT_TRUE(contains(refusal({{"diffusion_model.blocks.0.norm1.diff", counted({8})}}), "have no place"));
  HostArrays both = pair("diffusion_model.blocks.1.cross_attn.o");
  both[bias] = counted({8});
  const LoraFile f = read(both);
  EXPECT_TRUE(
      contains(message_of([&] { initial_lora(params, f, {.rank = 2, .alpha = 2}); }), "holds full-rank differences"));
}

TEST_F(TransformerLora, FilesOfOneOfTwoDenoisersRoundTrip) {
  const std::string path = "blocks.1.attn2.to_out.0.weight";
  for (const char* component : {"transformer", "transformer_2"}) {
    const bool second = component == std::string("transformer_2");
    LoraFile f;
    f.pairs[component][path] = {.down = counted({2, 8}), .up = counted({8, 2}), .alpha = 3};
    const std::string peft = write_peft_lora(folder.path(), f, names), comfyui = folder / "comfyui.safetensors",
                      kohya = folder / "kohya.safetensors";
    write_comfyui_lora(comfyui, f, names);
    write_kohya_lora(kohya, f, names, false);
    for (const auto& [file, key] : {std::pair(peft, "transformer.blocks.1.attn2.to_out.0.lora_A.weight"),
                                    {comfyui, "diffusion_model.blocks.1.cross_attn.o.lora_A.weight"},
                                    {kohya, "lora_unet_blocks_1_cross_attn_o.lora_down.weight"}}) {
      const SafetensorsReader written = SafetensorsReader::open(file);
      EXPECT_TRUE(written.tensors().contains(key)) << key;
      EXPECT_EQ(written.metadata().contains("component"), second) << file;
      const LoraFile back = read_lora(file, LoraTargets(params, names));
      ASSERT_EQ(only(back), component + ("/" + path)) << file;
      EXPECT_EQ(back.pairs.at(component).at(path).alpha, 3);
      EXPECT_EQ(back.pairs.at(component).at(path).up.to_doubles(), counted({8, 2}).to_doubles());
    }
    const json message = parse_json(SafetensorsReader::open(peft).metadata().at("lora_adapter_metadata"));
    EXPECT_EQ(message.at("transformer.lora_alpha"), 3);
  }
}

}  // namespace
}  // namespace md
