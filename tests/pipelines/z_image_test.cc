// Z-Image through the real program: what images follow beside the goldens, what is refused, and LoRA that is trained,
// resumed to the bit and sampled with.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kBase = kGoldens + "zimage/base";

struct ZImage : testing::Test {
  TemporaryFolder t;

  Outcome generate(const std::string& model, const Words& more) {
    Words words = {"generate_zimage",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "pretrained_model_name_or_path=" + model,
                   "output_dir=" + t.path(),
                   "prompt=a red heart",
                   "num_inference_steps=2",
                   "guidance_scale=2",
                   "height=16",
                   "width=16",
                   "output_type=latent"};
    words.insert(words.end(), more.begin(), more.end());
    return maxdiffusion(words);
  }
  std::vector<double> latents(const std::string& model, const Words& more, std::string* log = nullptr) {
    const Outcome o = generate(model, more);
    EXPECT_EQ(o.status, 0) << o.err;
    if (log) *log = o.err;
    return SafetensorsReader::open(t / "latents.safetensors").tensors().at("latents").to_doubles();
  }
  /// A copy of the folder that can be changed.
  std::string copy() {
    fs::copy(kBase, t / "model", fs::copy_options::recursive);
    return t / "model";
  }
  static void change(const std::string& file, const std::function<void(nlohmann::json&)>& how) {
    nlohmann::json j = parse_json(read_file(file));
    how(j);
    write_file_atomic(file, j.dump());
  }
};

TEST_F(ZImage, GuidesAboveZeroAndSaysWhatHasNoEffectWithoutGuidance) {
  std::string log;
  const std::vector<double> plain = latents(kBase, {"guidance_scale=0"}), guided = latents(kBase, {}, &log);
  EXPECT_FALSE(contains(log, "no effect")) << log;
  EXPECT_NE(guided, plain);
  EXPECT_NE(latents(kBase, {"guidance_scale=0.5"}), plain);
  EXPECT_EQ(latents(kBase, {"guidance_scale=0", "negative_prompt=blue", "cfg_truncation=0.1"}, &log), plain);
  EXPECT_TRUE(contains(log, "guidance_scale=0")) << log;
  EXPECT_TRUE(contains(log, "negative_prompt")) << log;
  EXPECT_EQ(latents(kBase, {"cfg_truncation=0", "num_inference_steps=1"}),  // the first step is at 0
            latents(kBase, {"num_inference_steps=1"}));
}

TEST_F(ZImage, ReadsAnEmptyPrompt) { EXPECT_NE(latents(kBase, {"prompt="}), latents(kBase, {})); }

TEST_F(ZImage, SaysWhatOfALongPromptIsCut) {
  std::string prompt, log;
  for (int i = 0; i < 5000; ++i) prompt += "7 ";
  const std::vector<double> out = latents(kBase, {"prompt=" + prompt}, &log);
  EXPECT_TRUE(contains(log, "caption longer than 512 tokens is cut: \"7 7 7 ") && contains(log, "tokens are not read"))
      << log;
  prompt += "and much more";
  EXPECT_EQ(latents(kBase, {"prompt=" + prompt}), out);
}

TEST_F(ZImage, RefusesAFolderWithoutItsTextEncoder) {
  const std::string model = copy();
  fs::remove_all(model + "/text_encoder");
  Outcome o = generate(model, {});
  EXPECT_EQ(o.status, 4) << o.err;
  EXPECT_TRUE(contains(o.err, "text_encoder/config.json")) << o.err;
  change(model + "/model_index.json", [](auto& j) { j.erase("text_encoder"); });
  o = generate(model, {});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "model_index.json has no text_encoder; a ZImagePipeline needs it")) << o.err;
}

TEST_F(ZImage, RefusesATextEncoderOfAnotherWidth) {
  const std::string model = copy();
  change(model + "/text_encoder/config.json", [](auto& j) { j["hidden_size"] = 12; });
  const Outcome o = generate(model, {});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "texts of 16 features ('cap_feat_dim'), the text encoder gives 12 ('hidden_size')"))
      << o.err;
}

TEST_F(ZImage, RefusesSizesAndLengthsThatTheTransformerHasNoPlacesFor) {
  Outcome o = generate(kBase, {"height=18"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "height=18")) << o.err;
  o = generate(kBase, {"height=320"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "80 rows of tokens; the transformer's 'axes_lens' has places for 64")) << o.err;
  o = generate(kBase, {"max_sequence_length=4000"});
  EXPECT_EQ(o.status, 2) << o.err;
  EXPECT_TRUE(contains(o.err, "max_sequence_length is 4000; expected 1 to 607")) << o.err;
}

TEST_F(ZImage, LoraIsResumedToTheBitAndSampledWith) {
  auto train = [&] {
    return maxdiffusion({"train_zimage", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "run_name=run",
                         "output_dir=" + t.path(), "pretrained_model_name_or_path=" + kBase,
                         "replay_batches=" + kGoldens + "training/batches_zimage.safetensors", "learning_rate=1e-2",
                         "disable_training_weights=true", "max_train_steps=6", "checkpoint_every=4", "train_lora=true",
                         "lora_rank=2", "lora_alpha=1"});
  };
  const std::string checkpoint = t / "run/checkpoints/6", peft = checkpoint + "/pytorch_lora_weights.safetensors";
  Outcome o = train();
  ASSERT_EQ(o.status, 0) << o.err;
  const std::string whole = read_file(peft);
  std::set<std::string> layers;
  for (const auto& [name, array] : SafetensorsReader::open(peft).tensors())
    if (name.ends_with(".lora_A.weight")) layers.insert(name.substr(0, name.size() - 14));
  EXPECT_EQ(layers.size(), 4u * (1 + 1 + 2));  // of attention, in every block
  EXPECT_TRUE(layers.contains("transformer.layers.1.attention.to_out.0"));
  EXPECT_TRUE(layers.contains("transformer.noise_refiner.0.attention.to_q"));
  fs::remove_all(checkpoint);
  ASSERT_EQ(train().status, 0);
  EXPECT_EQ(read_file(peft), whole);

  const std::vector<double> plain = latents(kBase, {}), own = latents(checkpoint, {});
  EXPECT_NE(own, plain);
  EXPECT_EQ(latents(kBase, {"lora_files=" + peft}), own);
  EXPECT_EQ(latents(kBase, {"lora_files=" + peft, "lora_scales=0"}), plain);
}

TEST_F(ZImage, SingleFilesOfComfyUiGiveTheSameWeights) {
  const std::string file = t / "z_image.safetensors";
  HostArrays original;
  std::map<std::string, std::vector<HostArray>> joined;
  for (const auto& [name, array] :
       SafetensorsReader::open(kBase + "/transformer/diffusion_pytorch_model.safetensors").tensors()) {
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
    Dims dims = parts[0].dims();
    dims[0] *= 3;
    HostArray all(Shape{parts[0].dtype(), dims});
    size_t to = 0;
    for (const size_t i : {1, 0, 2}) {
      std::copy_n(parts[i].data(), parts[i].bytes(), all.mutable_data() + to);
      to += parts[i].bytes();
    }
    original[name] = all;
  }
  write_safetensors(file, original);
  const std::string model = copy();
  const std::string weights = model + "/transformer/diffusion_pytorch_model.safetensors";
  const std::vector<double> plain = latents(model, {});
  HostArrays changed = SafetensorsReader::open(kBase + "/transformer/diffusion_pytorch_model.safetensors").tensors();
  changed["x_pad_token"] = changed.at("cap_pad_token");
  write_safetensors(weights, changed);
  EXPECT_NE(latents(model, {}), plain);
  EXPECT_EQ(latents(model, {"unet_checkpoint=" + file}), plain);
}

}  // namespace
}  // namespace md
