// Qwen-Image through the real program: properties of images that the goldens do not cover, errors, and LoRA that is
// trained, resumed to the bit and sampled.
#include "tests/pipelines/family_program.h"

namespace md {
namespace {

struct QwenImage : FamilyProgram {
  QwenImage()
      : FamilyProgram({"qwen_image", "qwenimage/base", "zimage", {"true_cfg_scale=2", "negative_prompt=grey"}}) {}
};

TEST_F(QwenImage, IsGuidedByTrueScaleAndSaysWhatHasNoEffect) {
  std::string log;
  const std::vector<double> plain = latents(base, {"true_cfg_scale=1"}, &log), guided = latents(base, {});
  EXPECT_TRUE(contains(log, "negative_prompt")) << log;
  EXPECT_TRUE(contains(log, "there is no guidance (true_cfg_scale up to 1")) << log;
  EXPECT_NE(guided, plain);
  EXPECT_NE(latents(base, {"negative_prompt=blue"}), guided);
  EXPECT_EQ(latents(base, {"negative_prompt=a red heart"}),
            latents(base, {"negative_prompt=a red heart", "true_cfg_scale=9"}));
  EXPECT_EQ(latents(base, {"guidance_scale=4"}, &log), guided);
  EXPECT_TRUE(contains(log, "guidance_scale") && contains(log, "this model is guided by true_cfg_scale")) << log;
}

TEST_F(QwenImage, CountsTokensBehindTheTemplate) {
  std::string log;
  const std::vector<double> whole = latents(base, {"max_sequence_length=512"}, &log);
  EXPECT_FALSE(contains(log, "max_sequence_length is ignored")) << log;
  EXPECT_EQ(whole, latents(base, {}));
  EXPECT_NE(latents(base, {"max_sequence_length=2"}, &log), whole);
  EXPECT_TRUE(contains(log, "caption longer than 2 tokens is cut")) << log;
}

TEST_F(QwenImage, RefusesTextEncodersThatDoNotFit) {
  const std::string model = copy(), config = model + "/text_encoder/config.json";
  change(config, [](auto& j) { j["text_config"]["hidden_size"] = 12; });
  Outcome o = generate(model, {});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "the sum of 'mrope_section' is 4, expected 3")) << o.err;
  change(config, [](auto& j) { j["text_config"]["use_sliding_window"] = true; });
  o = generate(model, {});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "'use_sliding_window' is true, which is not supported")) << o.err;
}

TEST_F(QwenImage, RefusesSizesAndLengths) {
  Outcome o = generate(base, {"height=18"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "height=18")) << o.err;
  o = generate(base, {"max_sequence_length=1025"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "max_sequence_length is 1025; expected 1 to 1024")) << o.err;
}

TEST_F(QwenImage, RefusesOtherPipelinesByName) {
  const std::string model = copy();
  change(model + "/model_index.json", [&](auto& j) { j["_class_name"] = "QwenImageLayeredPipeline"; });
  expect_refused(
      generate(model, {}), 2,
      "_class_name is 'QwenImageLayeredPipeline': a transformer and an autoencoder of images in layers, which "
      "is not supported");
  change(model + "/transformer/config.json", [](auto& j) { j["zero_cond_t"] = true; });
  change(model + "/model_index.json", [](auto& j) { j["_class_name"] = "QwenImagePipeline"; });
  expect_refused(generate(model, {}), 2,
                 "the transformer is of Qwen-Image-Edit ('zero_cond_t'), the pipeline is QwenImagePipeline; expected "
                 "QwenImageEditPlusPipeline");
}

// Qwen's folders before transformers 5 have the language model's sizes at the top level of the config.
TEST_F(QwenImage, ReadsConfigsWithoutATextConfig) {
  const std::string model = copy();
  change(model + "/text_encoder/config.json", [](auto& j) {
    nlohmann::json text = j["text_config"];
    j.erase("text_config");
    text["rope_theta"] = text["rope_parameters"]["rope_theta"];
    text["rope_scaling"] = {{"type", "mrope"}, {"mrope_section", text["rope_parameters"]["mrope_section"]}};
    text.erase("rope_parameters");
    text.erase("model_type");
    j.update(text);
  });
  EXPECT_EQ(latents(model, {}), latents(base, {}));
}

TEST_F(QwenImage, SingleFilesOfComfyUiGiveTheSameWeights) {
  const std::string model = copy(), weights = model + "/transformer/diffusion_pytorch_model.safetensors";
  const std::vector<double> plain = latents(model, {});
  const HostArrays tensors =
      SafetensorsReader::open(base + "/transformer/diffusion_pytorch_model.safetensors").tensors();
  HostArrays changed = tensors;
  changed["img_in.weight"] = HostArray(tensors.at("img_in.weight").shape());
  std::fill_n(changed["img_in.weight"].mutable_data(), changed["img_in.weight"].bytes(), std::byte{0});
  write_safetensors(weights, changed);
  EXPECT_NE(latents(model, {}), plain);
  for (const char* prefix : {"", "model.diffusion_model."}) {
    HostArrays named;
    for (const auto& [name, array] : tensors) named[prefix + name] = array;
    write_safetensors(t / "single.safetensors", named);
    EXPECT_EQ(latents(model, {"unet_checkpoint=" + (t / "single.safetensors")}), plain) << prefix;
  }
}

}  // namespace
}  // namespace md
