// Families with a language model as text encoder, through the real program: prompts of all lengths, incomplete folders,
// and LoRA that is trained, resumed to the bit and sampled.
#include "maxdiffusion/encoders/text_encoder.h"
#include "maxdiffusion/families/open_model.h"
#include "tests/one_device.h"
#include "tests/pipelines/family_program.h"

namespace md {
namespace {

namespace fs = std::filesystem;

struct Row {
  FamilyFacts facts;
  std::string pipeline, features;  // its class; the transformer's config key for the text width
  size_t adapted = 0;              // number of layers with LoRA, some of which are `layers`
  std::vector<std::string> layers = {};
};
void PrintTo(const Row& r, std::ostream* os) { *os << r.facts.name; }

struct LanguageFamily : FamilyProgram, testing::WithParamInterface<Row> {
  LanguageFamily() : FamilyProgram(GetParam().facts) {}
};

TEST_P(LanguageFamily, ReadsAnEmptyPrompt) { EXPECT_NE(latents(base, {"prompt="}), latents(base, {})); }

TEST_P(LanguageFamily, SaysWhatOfALongPromptIsCut) {
  std::string prompt, log;
  for (int i = 0; i < 5000; ++i) prompt += "7 ";
  const std::vector<double> out = latents(base, {"prompt=" + prompt}, &log);
  EXPECT_TRUE(contains(log, "caption longer than 512 tokens is cut: \"7 7 7 ") && contains(log, "tokens are not read"))
      << log;
  prompt += "and much more";
  EXPECT_EQ(latents(base, {"prompt=" + prompt}), out);
}

TEST_P(LanguageFamily, RefusesAFolderWithoutItsTextEncoder) {
  const std::string model = copy();
  fs::remove_all(model + "/text_encoder");
  expect_refused(generate(model, {}), 4, "text_encoder/config.json");
  change(model + "/model_index.json", [](auto& j) { j.erase("text_encoder"); });
  expect_refused(generate(model, {}), 2,
                 "model_index.json has no text_encoder; a " + GetParam().pipeline + " needs it");
}

TEST_P(LanguageFamily, RefusesATextEncoderOfAnotherWidth) {
  const std::string model = copy();
  change(model + "/text_encoder/config.json", [](auto& j) {
    nlohmann::json& text = j.contains("text_config") ? j["text_config"] : j;
    text["hidden_size"] = 12;
    text["rope_parameters"].erase("mrope_section");  // which depends on it
  });
  const Outcome o = generate(model, {});
  expect_refused(o, 2, "features ('" + GetParam().features + "')");
  expect_refused(o, 2, "12");
}

TEST_P(LanguageFamily, RefusesABrokenTokenizer) {
  const std::string model = copy(), file = model + "/tokenizer/tokenizer.json", whole = read_file(file);
  write_file_atomic(file, whole.substr(0, whole.size() / 2));
  expect_refused(generate(model, {}), 4, "tokenizer/tokenizer.json");
  write_file_atomic(file, whole);
  change(file, [](auto& j) { j["model"].erase("merges"); });
  expect_refused(generate(model, {}), 4, "tokenizer/tokenizer.json");
}

TEST_P(LanguageFamily, LoraIsResumedToTheBitAndSampledWith) {
  const Words lora = {"disable_training_weights=true", "checkpoint_every=4", "train_lora=true", "lora_rank=2",
                      "lora_alpha=1"};
  const std::string checkpoint = t / "run/checkpoints/6", peft = checkpoint + "/pytorch_lora_weights.safetensors";
  Outcome o = train(lora);
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string whole = read_file(peft);
  std::set<std::string> layers;
  for (const auto& [name, array] : SafetensorsReader::open(peft).tensors())
    if (name.ends_with(".lora_A.weight")) layers.insert(name.substr(0, name.size() - 14));
  EXPECT_EQ(layers.size(), GetParam().adapted);
  for (const std::string& layer : GetParam().layers) EXPECT_TRUE(layers.contains("transformer." + layer)) << layer;
  fs::remove_all(checkpoint);
  ASSERT_EQ(train(lora).status, 0);
  EXPECT_EQ(read_file(peft), whole);

  auto tensors = [](const std::string& folder) {
    std::set<std::string> names;
    for (const auto& [name, array] : SafetensorsReader::open(folder + "/text_encoder").tensors()) names.insert(name);
    return names;
  };
  EXPECT_EQ(tensors(checkpoint), tensors(base));  // also the unused ones
  const std::vector<double> plain = latents(base, {}), trained = latents(checkpoint, {});
  EXPECT_NE(trained, plain);
  EXPECT_EQ(latents(base, {"lora_files=" + peft}), trained);
  EXPECT_EQ(latents(base, {"lora_files=" + peft, "lora_scales=0"}), plain);
}

INSTANTIATE_TEST_SUITE_P(
    Families, LanguageFamily,
    testing::Values(Row{{"zimage", "zimage/base", "zimage", {"guidance_scale=2"}},
                        "ZImagePipeline",
                        "cap_feat_dim",
                        size_t{4} * (1 + 1 + 2),  // attention, in every block
                        {"layers.1.attention.to_out.0", "noise_refiner.0.attention.to_q"}},
                    Row{{"flux2klein", "flux2/base", "flux2", {"guidance_scale=2", "text_encoder_out_layers=[1,2,3]"}},
                        "Flux2KleinPipeline",
                        "joint_attention_dim",
                        size_t{4} * 2 + size_t{2} * 2,  // attention, and both layers of single blocks
                        {"transformer_blocks.1.attn.to_out.0", "single_transformer_blocks.1.attn.to_qkv_mlp_proj",
                         "single_transformer_blocks.0.attn.to_out"}},
                    Row{{"qwen_image", "qwenimage/base", "zimage", {"true_cfg_scale=2", "negative_prompt=grey"}},
                        "QwenImagePipeline",
                        "joint_attention_dim",
                        size_t{4} * 2,  // image tokens, in every block
                        {"transformer_blocks.1.attn.to_out.0", "transformer_blocks.0.attn.to_q"}}),
    [](const auto& info) { return info.param.facts.name; });

TEST(TextEncoderWeights, OfLayersBehindTheLastOneReadAreNotOnTheDevices) {
  for (const auto& [folder, read, layers] : {std::tuple{"zimage/base", std::vector<int64_t>{}, int64_t{2}},
                                             {"flux2/base", {1, 2, 2}, 2},
                                             {"flux2/base", {1, 2, 4}, 4}}) {
    SCOPED_TRACE(fmt::format("{} to layer {}", folder, layers));
    const OpenedModel model = open_model(std::string(MD_SOURCE_DIR "/tests/golden/") + folder,
                                         {.text_encoder_out_layers = read}, {.purpose = Purpose::sampling});
    TextEncoder encoder(one_device(), model.family, 1,
                        [&](const ParamTable& params, const std::string& c) { return model.weights.read(params, c); },
                        {}, {});
    encoder.encode({"red"});
    const auto config = parse_json(model.folder.files().at("text_encoder/config.json"));
    int64_t expected = 0, all = 0;
    const std::map<std::string, HostArrays> weights = encoder.weights();
    for (const auto& [name, a] : weights.at("text_encoder")) {
      all += a.bytes();
      const bool in_layer = name.starts_with("layers."), final_norm = name == "norm.weight";
      if (final_norm ? layers == config["num_hidden_layers"] : !in_layer || std::stoll(name.substr(7)) < layers)
        expected += a.bytes();
    }
    fmt::print("  {} layers of {}: {} bytes of {}\n", layers, config["num_hidden_layers"].get<int64_t>(), expected,
               all);
    EXPECT_EQ(encoder.bytes_on_devices(), expected);
    EXPECT_EQ(all, 4 * model.folder.params("text_encoder").count()) << "checkpoints are whole";
  }
}

}  // namespace
}  // namespace md
