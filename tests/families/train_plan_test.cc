// What a run would do according to its keys and its model's configs alone: without devices, weights or data.
#include "maxdiffusion/run/train_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

const std::string kConfigs = MD_SOURCE_DIR "/configs/", kGoldens = MD_SOURCE_DIR "/tests/golden/";

/// A tiny folder of the model that a config names.
std::string folder_of(const std::string& named) {
  const std::map<std::string, std::string> folders = {
      {"", "wan/t2v"},
      {"CompVis/stable-diffusion-v1-4", "pipelines/sd"},
      {"stable-diffusion-v1-5/stable-diffusion-v1-5", "pipelines/sd"},
      {"stabilityai/stable-diffusion-2-base", "pipelines/sd2"},
      {"stabilityai/stable-diffusion-2-1", "pipelines/sd2"},
      {"stabilityai/stable-diffusion-xl-base-1.0", "pipelines/sdxl"},
      {"Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan/t2v"},
      {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan/t2v"},
      {"Wan-AI/Wan2.2-T2V-A14B-Diffusers", "wan/a14b"},
      {"Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", "wan/i2v"},
      {"Wan-AI/Wan2.2-I2V-A14B-Diffusers", "wan/i2v_a14b"},
      {"black-forest-labs/FLUX.1-dev", "flux/dev"},
      {"black-forest-labs/FLUX.1-schnell", "flux/schnell"},
      {"black-forest-labs/FLUX.2-klein-4B", "flux2/distilled"},
      {"black-forest-labs/FLUX.2-klein-9B", "flux2/distilled"},
      {"Tongyi-MAI/Z-Image", "zimage/base"},
      {"Tongyi-MAI/Z-Image-Turbo", "zimage/base"},
      {"Qwen/Qwen-Image", "qwenimage/base"},
      {"Qwen/Qwen-Image-Edit-2509", "qwenimage_edit/plus"},
  };
  const auto it = folders.find(named);
  return it == folders.end() ? named : kGoldens + it->second;
}

TrainPlan plan_of(const std::string& file, std::vector<std::string> words = {}, const DeviceCounts& counts = {8, 1}) {
  words.insert(words.end(), {"run_name=planned", "output_dir=/nowhere"});
  const RunConfig c = RunConfig::load(kConfigs + file, words);
  ModelFolder folder = ModelFolder::open(folder_of(c.model.pretrained_model_name_or_path));
  if (!c.model.text_encoder_out_layers.empty())
    folder.set_option("text_encoder_out_layers", c.model.text_encoder_out_layers);
  if (c.model.max_sequence_length) folder.set_option("max_sequence_length", *c.model.max_sequence_length);
  return plan_training(training_request(c), folder, make_family(folder), counts);
}

std::string refusal(const std::string& file, const std::vector<std::string>& words) {
  try {
    plan_of(file, words);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    return e.what();
  }
  return "accepted";
}

struct Expected {
  std::string file;
  DataMode mode;
  int64_t batch, steps;
  MediaSize size;
  double rate;
  std::vector<std::string> trained;
  std::vector<std::string> words = {};
};
const std::vector<std::string> kUnet = {"unet"}, kTransformer = {"transformer"}, kLow = {"train_expert=low"};
// The text encoder of the tiny folder has fewer layers.
const std::vector<std::string> kThreeLayers = {"text_encoder_out_layers=[1,2,3]"};
// The tiny folder has positions for 64 rows of tokens.
const std::vector<std::string> kSmaller = {"resolution=256", "height=256", "width=256"};
constexpr DataMode kCached = DataMode::cached_latents, kRecords = DataMode::encoded_records;

const std::vector<Expected> kExpected = {
    {"base14.yml", kCached, 8, 800, {512, 512}, 1e-7, kUnet},
    {"base15.yml", kCached, 8, 800, {512, 512}, 1e-7, kUnet},
    {"base21.yml", kCached, 8, 800, {768, 768}, 1e-7, kUnet},
    {"base_2_base.yml", kCached, 8, 20, {512, 512}, 1e-7, kUnet},
    {"base_xl.yml", kCached, 16, 200, {1024, 1024}, 4e-7, kUnet},
    {"base_xl_lightning.yml", kCached, 16, 200, {1024, 1024}, 4e-7, kUnet},
    {"base_flux_dev.yml", kRecords, 8, 1500, {1024, 1024}, 1e-5, kTransformer},
    {"base_flux_schnell.yml", kCached, 8, 200, {1024, 1024}, 4e-7, kTransformer},
    {"base_flux2klein.yml", kCached, 8, 1500, {512, 512}, 1e-5, kTransformer, kThreeLayers},
    {"base_flux2klein_9B.yml", kCached, 8, 1500, {512, 512}, 1e-5, kTransformer, kThreeLayers},
    {"base_wan.yml", kRecords, 8, 1500, {720, 1280, 81}, 1e-5, kTransformer},
    {"base_wan_14b.yml", kRecords, 8, 1500, {720, 1280, 81}, 1e-5, kTransformer},
    {"base_wan_1_3b.yml", kRecords, 8, 1500, {480, 832, 81}, 1e-5, kTransformer},
    {"base_wan_27b.yml", kRecords, 8, 1500, {720, 1280, 81}, 1e-5, {"transformer_2"}, kLow},
    {"base_wan_i2v_14b.yml", kRecords, 8, 1500, {720, 1280, 81}, 1e-5, kTransformer},
    {"base_wan_i2v_27b.yml", kRecords, 8, 1500, {720, 1280, 81}, 1e-5, {"transformer_2"}, kLow},
    {"base_zimage.yml", kCached, 8, 1500, {256, 256}, 1e-4, kTransformer, kSmaller},
    {"base_zimage_turbo.yml", kCached, 8, 1500, {256, 256}, 1e-4, kTransformer, kSmaller},
    {"base_qwen_image.yml", kCached, 8, 1500, {1024, 1024}, 1e-4, kTransformer},
    {"base_qwen_image_edit.yml", kCached, 8, 1500, {1024, 1024}, 1e-4, kTransformer},
    {"quickstart.yml", kCached, 256, 1680, {48, 48}, 5e-3, kUnet},
    {"quickstart_video.yml", kCached, 128, 1750, {32, 32, 9}, 3e-3, kTransformer},
};

TEST(TrainPlan, OfEveryShippedConfigIsMadeWithoutDevicesOrWeights) {
  for (const auto& f : std::filesystem::directory_iterator(kConfigs)) {
    const std::string file = f.path().filename();
    if (f.path().extension() != ".yml") continue;
    const auto e = std::ranges::find(kExpected, file, &Expected::file);
    ASSERT_NE(e, kExpected.end()) << file << " has no row";
    const TrainPlan plan = plan_of(file, e->words);
    EXPECT_EQ(plan.data.mode, e->mode) << file;
    EXPECT_EQ(plan.batch_size(), e->batch) << file;
    EXPECT_EQ(plan.update_size(), e->batch) << file;
    EXPECT_EQ(plan.loop.step.optim.max_train_steps, e->steps) << file;
    EXPECT_DOUBLE_EQ(plan.loop.step.optim.learning_rate, e->rate) << file;
    EXPECT_EQ((Dims{plan.task.size.height, plan.task.size.width, plan.task.size.frames}),
              (Dims{e->size.height, e->size.width, e->size.frames}))
        << file;
    EXPECT_EQ(plan.denoisers, e->trained) << file;
    ASSERT_EQ(plan.tasks.size(), 1u) << file;
    EXPECT_EQ(plan.tasks[0].model(), e->trained[0]) << file;
    EXPECT_TRUE(plan.trains(e->trained[0]) && !plan.trains("text_encoder")) << file;
    EXPECT_FALSE(plan.lora || plan.eval) << file;
    EXPECT_EQ(plan.autoencoder.has_value(), file.starts_with("quickstart")) << file;
    EXPECT_EQ(plan.run.folder, "/nowhere/planned") << file;
  }
}

TEST(TrainPlan, OfTheQuickstartsSaysHowTheirDataIsMade) {
  const TrainPlan images = plan_of("quickstart.yml", {"dataset_save_location=/data"}),
                  video = plan_of("quickstart_video.yml", {"dataset_save_location=/data"});
  ASSERT_TRUE(images.data.source.emoji && video.data.source.emoji);
  EXPECT_EQ(images.data.source.config.dataset_name, "/data/noto-emoji-48");
  EXPECT_EQ(video.data.source.config.dataset_name, "/data/moving-emoji-32-9-8");
  EXPECT_EQ(images.data.cache.folder, "/data/cache");
  EXPECT_EQ(video.data.images.clip->frames, 9);
  EXPECT_EQ(images.autoencoder->steps, 800);
  EXPECT_EQ(images.autoencoder->task.batch_size, 64);
  EXPECT_EQ(video.autoencoder->image_steps, 300);
  EXPECT_EQ(images.samples->every, 100);
  EXPECT_EQ(video.samples->every, 400);
  EXPECT_FALSE(std::filesystem::exists("/data"));
}

TEST(TrainPlan, DecidesOnceWhatBatchesAreMadeOf) {
  const auto mode = [](std::vector<std::string> words, const std::string& file = "base_xl.yml") {
    return plan_of(file, std::move(words)).data.mode;
  };
  const std::string made = "dataset_type=synthetic", in_step = "cache_latents_text_encoder_outputs=false";
  EXPECT_EQ(mode({}), DataMode::cached_latents);
  EXPECT_EQ(mode({in_step}), DataMode::images);
  EXPECT_EQ(mode({"dataset_type=tfrecord"}), DataMode::encoded_records);
  EXPECT_EQ(mode({"dataset_type=tfrecord", "load_tfrecord_cached=false"}), DataMode::cached_latents);
  EXPECT_EQ(mode({"dataset_type=tfrecord", in_step}), DataMode::images);
  EXPECT_EQ(mode({made}), DataMode::cached_latents);
  EXPECT_EQ(mode({made, "synthetic_override_height=512"}), DataMode::synthetic_latents);
  EXPECT_EQ(mode({made}, "base_wan.yml"), DataMode::synthetic_latents);
  EXPECT_EQ(mode({"replay_batches=/nowhere.safetensors"}), DataMode::replay);
  EXPECT_EQ(mode({"instance_data_dir=/i", "class_data_dir=/c", "instance_prompt=a", "class_prompt=b"}),
            DataMode::dreambooth);
}

TEST(TrainPlan, CountsSamplesStepsAndRates) {
  const TrainPlan one = plan_of(
      "base_xl.yml", {"gradient_accumulation_steps=3", "scale_lr=true", "max_train_steps=-1", "num_train_epochs=2",
                      "train_text_encoder=true", "train_lora=true", "cache_latents_text_encoder_outputs=false",
                      "lora_rank=2", "network_reg_lrs=[down_blocks.*to_q=1e-5, to_k=0]", "loraplus_lr_ratio=16"});
  EXPECT_EQ(one.batch_size(), 16);
  EXPECT_EQ(one.update_size(), 48);
  EXPECT_DOUBLE_EQ(one.loop.step.optim.learning_rate, 48 * 4e-7);
  EXPECT_DOUBLE_EQ(one.loop.step.learning_rates.at("text_encoder"), 48 * 4.25e-6);
  const std::vector<std::pair<std::string, double>> by_name = {{"down_blocks.*to_q", 48 * 1e-5}, {"to_k", 0}};
  EXPECT_EQ(one.loop.step.rates_by_name, by_name);
  EXPECT_EQ(one.loop.step.loraplus_ratio, 16);
  EXPECT_TRUE(one.trains("text_encoder_2"));
  EXPECT_EQ(one.lora->config.rank, 2);
  EXPECT_EQ(one.loop.step.optim.max_train_steps, -1);
  EXPECT_EQ(with_data(one, one.task, {}, 480).loop.step.optim.max_train_steps, 20);
  EXPECT_THROW(with_data(one, one.task, {}, -1), Error);
  EXPECT_THROW(with_data(one, one.task, {}, 15), Error);
  const TrainPlan buckets = with_data(one, one.task, {{1024, 1024}, {832, 1216}}, 480);
  ASSERT_EQ(buckets.tasks.size(), 2u);
  EXPECT_EQ(buckets.tasks[1].size.width, 1216);
  // Each replica has a part of the batch.
  const TrainPlan four = plan_of("base_xl.yml", {}, {8, 4});
  EXPECT_EQ(four.task.batch_size, 4);
  EXPECT_EQ(four.batch_size(), 16);
  const TrainPlan both = plan_of("base_wan_27b.yml", {"train_expert=both"});
  ASSERT_EQ(both.tasks.size(), 2u);
  EXPECT_EQ(both.tasks[0].model(), "transformer");
  EXPECT_EQ(both.tasks[1].model(), "transformer_2");
}

// The memory for encoding a data set depends on the memory that a step uses (ModelComponents::encoder_bytes).
TEST(TrainPlan, KnowsTheBytesOfAWeightsState) {
  const auto bytes = [](std::vector<std::string> words) {
    words.insert(words.end(), {"run_name=planned", "output_dir=/nowhere"});
    return training_request(RunConfig::load(kConfigs + "base_xl.yml", words))
        .components.encoders.state_bytes_per_weight;
  };
  const std::string bf16 = "weights_dtype=bfloat16", rounded = "low_precision_update=stochastic_rounding";
  EXPECT_EQ(bytes({}), 8);
  EXPECT_EQ(bytes({"ema_decay=0.99"}), 12);
  EXPECT_EQ(bytes({bf16}), 12);
  EXPECT_EQ(bytes({bf16, rounded}), 8);
  EXPECT_EQ(bytes({bf16, rounded, "moments_dtype=bfloat16"}), 4);
  EXPECT_EQ(bytes({"optimizer=adamw8bit"}), 2);
  EXPECT_EQ(bytes({"optimizer=lion"}), 4);
  EXPECT_EQ(bytes({"train_lora=true"}), 0);
}

TEST(TrainPlan, HasTheSizesOfSyntheticSamples) {
  const TrainPlan plan = plan_of("base_wan.yml", {"dataset_type=synthetic", "synthetic_override_height=32",
                                                  "synthetic_override_width=48", "synthetic_override_num_frames=5"});
  EXPECT_EQ((Dims{plan.task.size.height, plan.task.size.width, plan.task.size.frames}), (Dims{32, 48, 5}));
  EXPECT_EQ(plan.tasks[0].size.width, 48);
  EXPECT_EQ(plan.data.source.config.synthetic_arrays.at("latents").dims[1], 4);
}

TEST(TrainPlan, RefusesWhatARunWouldFailBy) {
  EXPECT_NE(refusal("base_xl.yml", {"eval_every=2"}).find("eval_every needs eval_data_dir"), std::string::npos);
  EXPECT_NE(refusal("base_xl.yml", {"resolution=1000", "per_device_batch_size=0.3"}).find("expected a whole number"),
            std::string::npos);
  EXPECT_NE(refusal("base_xl.yml", {"resolution=1001"}).find("resolution=1001"), std::string::npos);
  EXPECT_NE(refusal("quickstart.yml", {"vae_image_pretrain_steps=3"}).find("this model generates images"),
            std::string::npos);
}

TEST(TrainPlan, IsPrintedAsNamesAndValues) {
  const std::string text = describe(plan_of("base_xl.yml", {"seed=7", "train_lora=true", "lora_rank=2"}));
  for (const char* line :
       {"folder: /nowhere/planned\n", "checkpoints: /nowhere/planned/checkpoints\n", "seed: 7\n", "sample_seed: 7\n",
        "data: images, encoded once\n", "source: diffusers/pokemon-gpt4-captions\n", "size: 1024x1024\n", "batch: 16\n",
        "accumulation: 1\n", "steps: 200\n", "trained: unet\n", "learning_rate: 4e-07\n", "lora: rank 2, alpha 2, in "})
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
}

}  // namespace
}  // namespace md
