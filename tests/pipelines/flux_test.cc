// FLUX.1 through the real program: properties of images that the goldens do not cover, and full and LoRA training that
// is killed, resumed to the bit and sampled.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/media/image.h"
#include "tests/cli/command.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

const std::string kGoldens = MD_SOURCE_DIR "/tests/golden/", kDev = kGoldens + "flux/dev";

struct FluxImages : testing::Test {
  TemporaryFolder t;

  Outcome generate(const Words& extra) {
    Words words = {"generate_flux",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "pretrained_model_name_or_path=" + kDev,
                   "output_dir=" + t.path(),
                   "num_inference_steps=2",
                   "height=16",
                   "width=16",
                   "max_sequence_length=12"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  std::vector<double> latents(Words words, std::string* log = nullptr) {
    words.push_back("output_type=latent");
    const Outcome o = generate(words);
    EXPECT_EQ(o.status, 0) << o.err;
    if (log) *log = o.err;
    return SafetensorsReader::open(t / "latents.safetensors").tensors().at("latents").to_doubles();
  }
};

TEST_F(FluxImages, FollowTheirKeys) {
  std::string log;
  const std::vector<double> plain = latents({"prompt=red heart", "guidance_scale=3.5"}, &log);
  EXPECT_FALSE(contains(log, "ignored")) << log;
  // A negative prompt alone has no effect, and the log says so.
  EXPECT_EQ(latents({"prompt=red heart", "guidance_scale=3.5", "negative_prompt=blue"}, &log), plain);
  EXPECT_TRUE(contains(log, "negative_prompt is ignored")) << log;
  // A file's second prompt only applies to the file's prompt.
  write_file_atomic(t / "two.yml",
                    "base: " MD_SOURCE_DIR "/tests/pipelines/generate.yml\nprompt: red heart\nprompt_2: blue\n");
  auto of_file = [&](const Words& extra) {
    Words words = {"generate_flux",
                   t / "two.yml",
                   "pretrained_model_name_or_path=" + kDev,
                   "output_dir=" + t.path(),
                   "num_inference_steps=2",
                   "height=16",
                   "width=16",
                   "max_sequence_length=12",
                   "guidance_scale=3.5",
                   "output_type=latent"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    log = o.err;
    return SafetensorsReader::open(t / "latents.safetensors").tensors().at("latents").to_doubles();
  };
  const std::vector<double> second = of_file({});
  EXPECT_NE(second, plain);
  EXPECT_EQ(of_file({"prompt=red heart"}), plain);
  EXPECT_TRUE(contains(log, "prompt_2 of the file is ignored")) << log;
  EXPECT_EQ(of_file({"prompt=red heart", "prompt_2=blue"}), second);
  const Outcome many = generate({"prompt=[a, b, c]", "prompt_2=[a, b]"});
  EXPECT_EQ(many.status, 2);
  EXPECT_TRUE(contains(many.err, "prompt_2 has 2 texts for 3 prompts")) << many.err;
}

TEST_F(FluxImages, AreFilesOfTheirName) {
  ASSERT_EQ(generate({"prompt=red heart", "num_images_per_prompt=2", "guidance_scale=2.5"}).status, 0);
  const std::string bytes = read_file(t / "flux_1.png");
  EXPECT_TRUE(contains(bytes, "CFG scale: 1, Distilled CFG Scale: 2.5, Seed: 0")) << bytes.substr(0, 400);
  EXPECT_TRUE(exists(t / "flux_0.png"));
  EXPECT_FALSE(exists(t / "flux_2.png"));
}

struct TrainedFlux : testing::Test {
  TemporaryFolder t;

  Outcome train(const std::string& name, const Words& extra) {
    Words words = {"train_flux",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "run_name=" + name,
                   "output_dir=" + t.path(),
                   "pretrained_model_name_or_path=" + kDev,
                   "replay_batches=" + kGoldens + "training/batches_flux.safetensors",
                   "learning_rate=1e-2",
                   "guidance_scale=3.5",
                   "max_train_steps=6",
                   "checkpoint_every=8",
                   "max_sequence_length=12"};
    words.insert(words.end(), extra.begin(), extra.end());
    return maxdiffusion(words);
  }
  std::string file(const std::string& run, int step, const std::string& name) {
    return t / (run + "/checkpoints/" + std::to_string(step) + "/" + name);
  }
  std::vector<double> generated(const std::string& model, const Words& extra = {}) {
    Words words = {"generate_flux",
                   MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                   "pretrained_model_name_or_path=" + model,
                   "output_dir=" + (t / "sampled"),
                   "prompt=a red heart",
                   "num_inference_steps=2",
                   "height=16",
                   "width=16",
                   "max_sequence_length=12",
                   "output_type=latent"};
    words.insert(words.end(), extra.begin(), extra.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return SafetensorsReader::open(t / "sampled/latents.safetensors").tensors().at("latents").to_doubles();
  }
};

TEST_F(TrainedFlux, FromRandomWeightsIsResumedToTheBitAndSampled) {
  const std::string weights = "transformer/diffusion_pytorch_model.safetensors";
  Outcome o = train("whole", {"train_new_flux=true"});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("parts", {"train_new_flux=true", "max_train_steps=4"});
  ASSERT_EQ(o.status, 0) << o.err;
  o = train("parts", {"train_new_flux=true"});
  ASSERT_EQ(o.status, 0) << o.err;
  EXPECT_EQ(read_file(file("parts", 6, weights)), read_file(file("whole", 6, weights)));
  EXPECT_NE(read_file(file("whole", 4, weights)), read_file(file("whole", 6, weights)));
  EXPECT_NE(generated(file("whole", 6, "")), generated(kDev));
}

TEST_F(TrainedFlux, LoraIsResumedToTheBitAndSampled) {
  const Words lora = {"train_lora=true", "lora_rank=2", "lora_alpha=1"};
  const std::string peft = "pytorch_lora_weights.safetensors", kohya = "lora_kohya.safetensors";
  ASSERT_EQ(train("run", lora).status, 0);
  const std::string whole = read_file(file("run", 6, peft));
  fs::remove_all(file("run", 6, ""));
  ASSERT_EQ(train("run", lora).status, 0);
  EXPECT_EQ(read_file(file("run", 6, peft)), whole);
  std::vector<std::string> layers;
  for (const auto& [name, array] : SafetensorsReader::open(file("run", 6, peft)).tensors())
    if (name.ends_with(".lora_A.weight")) layers.push_back(name.substr(0, name.size() - 14));
  // Double-stream blocks have eight attention and four feed-forward layers, single-stream ones three attention layers.
  EXPECT_EQ(layers.size(), 2u * 12 + 2 * 3);
  const std::vector<double> plain = generated(kDev), trained = generated(file("run", 6, ""));
  EXPECT_NE(trained, plain);
  EXPECT_EQ(generated(kDev, {"lora_files=" + file("run", 6, peft)}), trained);
  EXPECT_EQ(generated(kDev, {"lora_files=" + file("run", 6, peft), "lora_scales=0"}), plain);
  // That file stores queries, keys and values as one tensor, so its products are summed in another order.
  const SafetensorsReader written = SafetensorsReader::open(file("run", 6, kohya));
  EXPECT_TRUE(written.tensors().contains("lora_unet_double_blocks_1_txt_attn_qkv.lora_up.weight"));
  EXPECT_EQ(written.metadata().at("ss_base_model_version"), "flux1");
  const std::vector<double> original = generated(kDev, {"lora_files=" + file("run", 6, kohya)});
  ASSERT_EQ(original.size(), trained.size());
  for (size_t i = 0; i < trained.size(); ++i) EXPECT_NEAR(original[i], trained[i], 1e-4) << i;
}

TEST_F(TrainedFlux, OnImagesTheTextEncodersLeaveFirst) {
  make_folders(t / "pictures");
  for (int i = 0; i < 2; ++i) {
    HostArray rgb(Shape{DType::u8, {16, 16, 3}});
    auto v = rgb.mutable_view<uint8_t>();
    for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(41 * i + static_cast<int>(k % 48) * 5);
    write_png(t / ("pictures/" + std::to_string(i) + ".png"), rgb);
    write_file_atomic(t / ("pictures/" + std::to_string(i) + ".txt"), "heart");
  }
  const Words words = {"replay_batches=",
                       "train_data_dir=" + (t / "pictures"),
                       "resolution=16",
                       "max_train_steps=1",
                       "per_device_batch_size=2",
                       "num_inference_steps=1",
                       "prompt=heart"};
  auto log_of = [&](const std::string& name, const std::string& word) {
    Words all = words;
    all.push_back(word);
    const Outcome o = train(name, all);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.err;
  };
  const std::string left = "the text encoders are removed from the devices";
  const std::string at_the_end = log_of("end", "sample_every=-1");
  EXPECT_LT(at_the_end.find(left), at_the_end.find("completed step: 1")) << at_the_end;
  EXPECT_TRUE(exists(t / "end/samples/step_000001.png")) << at_the_end;
  EXPECT_FALSE(contains(log_of("on_the_way", "sample_every=1"), left));
}

}  // namespace
}  // namespace md
