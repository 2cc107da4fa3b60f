// Z-Image through the real program: guidance, sizes and ComfyUI files.
#include "tests/pipelines/family_program.h"

namespace md {
namespace {

struct ZImage : FamilyProgram {
  ZImage() : FamilyProgram({"zimage", "zimage/base", "zimage", {"guidance_scale=2"}}) {}
};

TEST_F(ZImage, GuidesAboveZeroAndSaysWhatHasNoEffectWithoutGuidance) {
  std::string log;
  const std::vector<double> plain = latents(base, {"guidance_scale=0"}), guided = latents(base, {}, &log);
  EXPECT_FALSE(contains(log, "ignored")) << log;
  EXPECT_NE(guided, plain);
  EXPECT_NE(latents(base, {"guidance_scale=0.5"}), plain);
  EXPECT_EQ(latents(base, {"guidance_scale=0", "negative_prompt=blue", "cfg_truncation=0.1"}, &log), plain);
  EXPECT_TRUE(contains(log, "guidance_scale=0")) << log;
  EXPECT_TRUE(contains(log, "negative_prompt")) << log;
  EXPECT_EQ(latents(base, {"cfg_truncation=0", "num_inference_steps=1"}),  // the first step has time 0
            latents(base, {"num_inference_steps=1"}));
}

TEST_F(ZImage, RefusesSizesAndLengthsThatTheTransformerHasNoPlacesFor) {
  expect_refused(generate(base, {"height=18"}), 2, "height=18");
  expect_refused(generate(base, {"height=320"}), 2,
                 "80 rows of tokens; the transformer's 'axes_lens' has places for 64");
  expect_refused(generate(base, {"max_sequence_length=4000"}), 2, "max_sequence_length is 4000; expected 1 to 607");
}

TEST_F(ZImage, SingleFilesOfComfyUiGiveTheSameWeights) {
  const std::string file = t / "z_image.safetensors";
  HostArrays original;
  std::map<std::string, std::vector<HostArray>> joined;
  for (const auto& [name, array] :
       SafetensorsReader::open(base + "/transformer/diffusion_pytorch_model.safetensors").tensors()) {
    std::string other = "model.diffusion_model." + name;
    for (const auto& [from, to] : {std::pair{"all_x_embedder.2-1.", "x_embedder."},
                                   {"all_final_layer.2-1.", "final_layer."},
                                   {".attention.norm_q.", ".attention.q_norm."},
                                   {".attention.norm_k.", ".attention.k_norm."},
                                   {".attention.to_out.0.", ".attention.out."}})
      if (const size_t at = other.find(from); at != other.npos) other.replace(at, std::string(from).size(), to);
    if (const size_t at = other.find(".attention.to_"); at != other.npos) {  // in the order k, q, v
      joined[other.substr(0, at) + ".attention.qkv.weight"].push_back(array);
    } else {
      original[other] = array;
    }
  }
  for (const auto& [name, parts] : joined) {
    ASSERT_EQ(parts.size(), 3u);
    original[name] = below_each_other({parts[1], parts[0], parts[2]});
  }
  write_safetensors(file, original);
  const std::string model = copy();
  const std::string weights = model + "/transformer/diffusion_pytorch_model.safetensors";
  const std::vector<double> plain = latents(model, {});
  HostArrays changed = SafetensorsReader::open(base + "/transformer/diffusion_pytorch_model.safetensors").tensors();
  changed["x_pad_token"] = changed.at("cap_pad_token");
  write_safetensors(weights, changed);
  EXPECT_NE(latents(model, {}), plain);
  EXPECT_EQ(latents(model, {"unet_checkpoint=" + file}), plain);
}

}  // namespace
}  // namespace md
