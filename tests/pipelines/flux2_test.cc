// FLUX.2-klein through the real program: guidance, reference images, latents as files, ComfyUI files.
#include "maxdiffusion/base/host_array_rows.h"
#include "tests/pipelines/family_program.h"

namespace md {
namespace {

struct Flux2 : FamilyProgram {
  Flux2() : FamilyProgram({"flux2klein", "flux2/base", "flux2", {"text_encoder_out_layers=[1,2,3]"}}) {}

  const std::string distilled = MD_SOURCE_DIR "/tests/golden/flux2/distilled";
};

TEST_F(Flux2, IsGuidedAboveOneUnlessItWasDistilled) {
  std::string log;
  const std::vector<double> plain = latents(base, {"guidance_scale=1"});
  EXPECT_NE(latents(base, {"guidance_scale=2"}, &log), plain);
  EXPECT_FALSE(contains(log, "ignored")) << log;
  EXPECT_EQ(latents(base, {"guidance_scale=0.5"}), plain);
  const std::vector<double> once = latents(distilled, {"guidance_scale=1"});
  EXPECT_EQ(latents(distilled, {"guidance_scale=4", "negative_prompt=blue"}, &log), once);
  EXPECT_TRUE(contains(log, "guidance_scale") && contains(log, "this model was distilled to sample without guidance"))
      << log;
}

TEST_F(Flux2, ReadsTheLayersOfItsTextEncoderThatAKeyNames) {
  EXPECT_NE(latents(base, {"text_encoder_out_layers=[3,2,1]"}), latents(base, {}));
  // Without a config file the folder is looked at first: with the keys of the command line too.
  const Outcome o = maxdiffusion({"generate", base, "prompt=x", "text_encoder_out_layers=[1,2,3]",
                                  "max_sequence_length=12", "num_inference_steps=1", "height=16", "width=16",
                                  "hardware=cpu", "output_dir=" + (t / "first_look")});
  EXPECT_EQ(o.status, 0) << o.err;
  EXPECT_TRUE(contains(o.err, "1 image of 16x16 denoised")) << o.err;
  expect_refused(generate(base, {"text_encoder_out_layers=[1,2,5]"}), 2,
                 "text_encoder_out_layers holds 5; the text encoder of " + base + " has 4 layers");
  expect_refused(generate(base, {"text_encoder_out_layers=[1,2]"}), 2, "2 layers of the text encoder give 16");
}

// P-23
TEST_F(Flux2, SamplesAreAsLargeAsTheFirstReferenceImageWhereNoKeySaysOtherwise) {
  const std::string images = image("a.png", 66, 81, 3) + "," + image("b.png", 70, 64, 90);
  const Words words = {"image=" + images, "output_type=np", "height=null", "width=null", "num_inference_steps=1"};
  ASSERT_EQ(generate(base, words).status, 0);
  EXPECT_EQ(SafetensorsReader::open(t / "images.safetensors").tensors().at("images").dims(), (Dims{1, 64, 80, 3}));
  const std::vector<double> both = latents(base, {"image=" + images}), first = latents(base, {"image=" + t / "a.png"});
  EXPECT_NE(both, first);
  EXPECT_NE(first, latents(base, {}));
  EXPECT_NE(latents(base, {"image=" + (t / "b.png") + "," + (t / "a.png")}), both);  // each image has its own time
}

// P-23
TEST_F(Flux2, RefusesReferenceImagesThatItDoesNotTake) {
  expect_refused(generate(base, {"image=" + image("dot.png", 1, 1, 0)}), 2,
                 "image: a reference of 1x1 pixels; expected 64 or more a side");
  expect_refused(generate(base, {"image=" + image("band.png", 20000, 80, 0)}), 2,
                 "image: a reference of 20000x80 pixels; expected a side at most 8 times as long as the other");
  expect_refused(generate(base, {"image=" + (t / "none.png")}), 4, "none.png");
  std::string many = image("a.png", 64, 64, 0);
  for (int i = 0; i < 10; ++i) many += "," + (t / "a.png");
  expect_refused(generate(base, {"image=" + many}), 2, "11 images are given; this model takes up to 10");
}

TEST_F(Flux2, RefusesFlux2DevByTheNameOfItsTextEncoder) {
  const std::string model = copy();
  change(model + "/model_index.json", [](auto& j) {
    j["_class_name"] = "Flux2Pipeline";
    j["text_encoder"] = {"transformers", "Mistral3ForConditionalGeneration"};
  });
  expect_refused(generate(model, {}), 2, "the text encoder of FLUX.2-dev, Mistral, is not supported");
}

/// The original program's name of a diffusers parameter, and the index of its part there.
std::pair<std::string, size_t> original_name(const std::string& name) {
  std::string other = name;
  size_t part = 0;
  for (const auto& [from, to] : {std::pair<std::string, std::string>{"single_transformer_blocks.", "single_blocks."},
                                 {"transformer_blocks.", "double_blocks."},
                                 {".attn.to_qkv_mlp_proj.", ".linear1."},
                                 {".attn.to_out.weight", ".linear2.weight"},
                                 {".attn.to_out.0.", ".img_attn.proj."},
                                 {".attn.to_add_out.", ".txt_attn.proj."},
                                 {".ff.linear_in.", ".img_mlp.0."},
                                 {".ff.linear_out.", ".img_mlp.2."},
                                 {".ff_context.linear_in.", ".txt_mlp.0."},
                                 {".ff_context.linear_out.", ".txt_mlp.2."},
                                 {".attn.norm_added_q.weight", ".txt_attn.norm.query_norm.scale"},
                                 {".attn.norm_added_k.weight", ".txt_attn.norm.key_norm.scale"},
                                 {"x_embedder.", "img_in."},
                                 {"context_embedder.", "txt_in."},
                                 {"time_guidance_embed.timestep_embedder.linear_1.", "time_in.in_layer."},
                                 {"time_guidance_embed.timestep_embedder.linear_2.", "time_in.out_layer."},
                                 {"_modulation_img.linear.", "_modulation_img.lin."},
                                 {"_modulation_txt.linear.", "_modulation_txt.lin."},
                                 {"stream_modulation.linear.", "stream_modulation.lin."},
                                 {"norm_out.linear.", "final_layer.adaLN_modulation.1."},
                                 {"proj_out.", "final_layer.linear."}})
    if (const size_t at = other.find(from);
        at != other.npos && (at == 0 || from[0] == '.' || from[0] == '_' || from[1] == 't'))
      other.replace(at, from.size(), to);
  const std::string norm = other.starts_with("single_blocks.") ? ".norm." : ".img_attn.norm.";
  for (const auto& [from, to] :
       {std::pair{".attn.norm_q.weight", "query_norm.scale"}, {".attn.norm_k.weight", "key_norm.scale"}})
    if (const size_t at = other.find(from); at != other.npos) other.replace(at, std::string(from).size(), norm + to);
  const std::pair<const char*, const char*> fused[] = {
      {".attn.to_q.", ".img_attn.qkv."},       {".attn.to_k.", ".img_attn.qkv."},
      {".attn.to_v.", ".img_attn.qkv."},       {".attn.add_q_proj.", ".txt_attn.qkv."},
      {".attn.add_k_proj.", ".txt_attn.qkv."}, {".attn.add_v_proj.", ".txt_attn.qkv."}};
  for (size_t i = 0; i < std::size(fused); ++i)
    if (const size_t at = other.find(fused[i].first); at != other.npos) {
      other.replace(at, std::string(fused[i].first).size(), fused[i].second);
      part = i % 3;
    }
  return {other, part};
}

TEST_F(Flux2, SingleFilesOfTheOriginalProgramGiveTheSameWeights) {
  std::map<std::string, std::map<size_t, HostArray>> parts;
  for (const auto& [name, array] :
       SafetensorsReader::open(base + "/transformer/diffusion_pytorch_model.safetensors").tensors()) {
    const auto [other, part] = original_name(name);
    parts[other][part] = array;
  }
  HostArrays original;
  for (const auto& [name, some] : parts) {
    std::vector<HostArray> all;
    for (const auto& [part, array] : some) all.push_back(array);
    if (name.starts_with("final_layer.adaLN")) {  // shift and scale are swapped
      const HostArray& both = all.at(0);
      all = {rows(both, both.dims()[0] / 2, both.dims()[0] / 2), rows(both, 0, both.dims()[0] / 2)};
    }
    original["model.diffusion_model." + name] = below_each_other(all);
  }
  EXPECT_TRUE(original.contains("model.diffusion_model.double_blocks.1.txt_attn.qkv.weight"));
  EXPECT_TRUE(original.contains("model.diffusion_model.single_blocks.0.norm.query_norm.scale"));
  const std::string model = copy(), weights = model + "/transformer/diffusion_pytorch_model.safetensors",
                    file = t / "flux2.safetensors";
  write_safetensors(file, original);
  const std::vector<double> plain = latents(model, {});
  HostArrays changed = SafetensorsReader::open(base + "/transformer/diffusion_pytorch_model.safetensors").tensors();
  std::swap(changed.at("transformer_blocks.0.attn.to_q.weight"), changed.at("transformer_blocks.1.attn.to_q.weight"));
  write_safetensors(weights, changed);
  EXPECT_NE(latents(model, {}), plain);
  EXPECT_EQ(latents(model, {"unet_checkpoint=" + file}), plain);
}

}  // namespace
}  // namespace md
