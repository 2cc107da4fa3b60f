// A family that the library does not know is registered here and uses the same functions as the built-in ones: it is
// trained, resumed to the bit, evaluated by timestep and sampled.
#include "tests/families/toy_family.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/media/image.h"

namespace md {
namespace {

/// Writes 8×8 images of one colour each, dark to bright, with the colour's name as caption.
void write_images(const std::string& folder) {
  make_folders(folder);
  for (size_t kind = 0; kind < kToyClasses.size(); ++kind)
    for (int i = 0; i < 8; ++i) {
      HostArray rgb(Shape{DType::u8, {8, 8, 3}});
      auto v = rgb.mutable_view<uint8_t>();
      for (size_t k = 0; k < v.size(); ++k) v[k] = static_cast<uint8_t>(k % 3 == kind ? 200 + 7 * i : 6 * i);
      const std::string name = fmt::format("{}/{}{}", folder, kToyClasses[kind], i);
      write_png(name + ".png", rgb);
      write_file_atomic(name + ".txt", kToyClasses[kind]);
    }
}

class ToyFamily : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    add_toy_family();
    root_ = new TemporaryFolder;
    write_toy_folder(*root_ / "model");
    write_images(*root_ / "images");
  }
  static void TearDownTestSuite() { delete root_; }

  static RunConfig config(const std::string& run, std::vector<std::string> words) {
    const std::string& r = root_->path();
    const std::vector<std::string> all = {"run_name=" + run,
                                          "output_dir=" + r,
                                          "pretrained_model_name_or_path=" + r + "/model",
                                          "train_data_dir=" + r + "/images",
                                          "eval_data_dir=" + r + "/images",
                                          "dataset_save_location=" + r + "/cache"};
    words.insert(words.begin(), all.begin(), all.end());
    return RunConfig::from_source(ConfigSource::from_text(R"(
train_new_unet: true
activations_dtype: float32
resolution: 8
per_device_batch_size: 12
learning_rate: 2.e-3
learning_rate_schedule_steps: 240
lr_scheduler: cosine
adam_weight_decay: 0
caption_dropout: 0.1
train_flow_shift: 1
timesteps_list: [100, 500, 900]
eval_max_number_of_samples_in_bucket: 24
num_inference_steps: 12
guidance_scale: 2
output_type: np
)",
                                                          words));
  }
  static TrainingRequest request(const std::string& run, const std::vector<std::string>& words) {
    return training_request(config(run, words));
  }
  static std::vector<nlohmann::json> metrics(const std::string& run) {
    std::vector<nlohmann::json> lines;
    std::istringstream in(read_file(*root_ / run + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);) lines.push_back(parse_json(line));
    return lines;
  }
  static TemporaryFolder* root_;
};
TemporaryFolder* ToyFamily::root_ = nullptr;

// P-4
TEST_F(ToyFamily, TrainsIsEvaluatedByTimestepAndFollowsThePrompt) {
  train(request("learns", {"max_train_steps=240", "eval_every=120"}));
  const std::vector<nlohmann::json> lines = metrics("learns");
  ASSERT_EQ(lines.size(), 240u);
  for (const char* name : {"eval_loss_timestep_100", "eval_loss_timestep_500", "eval_loss_timestep_900"}) {
    EXPECT_GT(lines[119].at(name), 0) << name;
    EXPECT_LT(lines[239].at(name), lines[119].at(name)) << name;
  }
  EXPECT_LT(lines[239].at("eval_loss"), 0.2 * lines[0].at("loss").get<double>());

  RunConfig sampling = config("learns", {R"(prompt=["red", "green", "blue"])", "num_images_per_prompt=2"});
  sampling.on_command_line.clear();  // the run's checkpoint
  generate(generate_request(sampling));
  const HostArray images = SafetensorsReader::open(*root_ / "learns/images.safetensors").tensors().at("images");
  ASSERT_EQ(to_string(images.shape()), "f32[6,8,8,3]");
  auto v = images.view<float>();
  for (size_t i = 0; i < 6; ++i) {
    double mean[3] = {};
    for (size_t k = 0; k < 192; ++k) mean[k % 3] += v[i * 192 + k] / 64;
    for (size_t channel = 0; channel < 3; ++channel)
      EXPECT_NEAR(mean[channel], channel == i / 2 ? 0.88 : 0.08, 0.15) << "image " << i << ", channel " << channel;
  }
  // A pipeline that stays loaded gives the same images, and others.
  PipelineOptions options;
  options.layers.activations_dtype = "float32";
  options.batch.per_device = 12;
  DiffusionPipeline pipeline = DiffusionPipeline::load(*root_ / "learns", options);
  SampleRequest request;
  request.resolution = 8, request.num_inference_steps = 12, request.guidance_scale = 2;
  request.prompt = {"red", "green", "blue"}, request.num_images_per_prompt = 2;
  const HostArray media = pipeline.generate(request).media;
  for (size_t i = 0; i < v.size(); ++i) ASSERT_EQ(std::clamp(media.view<float>()[i] / 2 + 0.5f, 0.0f, 1.0f), v[i]) << i;
  request.prompt = {"blue"};
  EXPECT_EQ(to_string(pipeline.generate(request).media.shape()), "f32[2,8,8,3]");
}

TEST_F(ToyFamily, IsNotTrainedWithDropoutLayersThatItDoesNotHave) {
  try {
    train(request("drops", {"max_train_steps=1", "dropout=0.1"}));
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_NE(std::string(e.what()).find("has no dropout layers; set it to 0"), std::string::npos) << e.what();
  }
}

TEST_F(ToyFamily, IsFoundByItsNamesAndTypes) {
  auto open = [](const std::vector<std::string>& words) { ModelComponents(request("named", words).components); };
  EXPECT_NO_THROW(open({"model_name=toy1", "model_type=T2I"}));
  for (const auto& [word, message] :
       {std::pair{"model_name=toy2", "model_name is 'toy2', but "}, std::pair{"model_type=T2V", "expected T2I"}})
    try {
      open({word});
      ADD_FAILURE() << word;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(std::string(e.what()).find(message), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("is a ToyPipeline"), std::string::npos) << e.what();
    }
}

// P-4
TEST_F(ToyFamily, ResumesToTheBit) {
  train(request("whole", {"max_train_steps=6"}));
  train(request("parts", {"max_train_steps=3"}));
  train(request("parts", {"max_train_steps=6"}));
  for (const char* file : {"transformer/diffusion_pytorch_model.safetensors", "training_state/arrays.safetensors",
                           "training_state/state.json"})
    EXPECT_EQ(read_file(*root_ / "whole/checkpoints/6/" + file), read_file(*root_ / "parts/checkpoints/6/" + file))
        << file;
  EXPECT_NE(read_file(*root_ / "parts/checkpoints/3/training_state/arrays.safetensors"),
            read_file(*root_ / "parts/checkpoints/6/training_state/arrays.safetensors"));
}

// P-4
TEST_F(ToyFamily, FoldersOfUnknownPipelinesAndClassesAreRefusedWithTheList) {
  auto refusal = [&](const std::string& index) {
    write_toy_folder(*root_ / "other");
    write_file_atomic(*root_ / "other/model_index.json", index);
    try {
      train(request("refused", {"pretrained_model_name_or_path=" + *root_ / "other", "max_train_steps=1"}));
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const std::string pipeline = refusal(R"({"_class_name": "OtherPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"], "transformer": ["toy", "ToyTransformer"]})");
  EXPECT_NE(pipeline.find("_class_name is 'OtherPipeline'; expected one of: "), std::string::npos) << pipeline;
  const std::string model = refusal(R"({"_class_name": "ToyPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"], "transformer": ["toy", "OtherTransformer"]})");
  EXPECT_NE(
      model.find(
          "the class of transformer is 'OtherTransformer'; expected one of: ToyTransformer, UNet2DConditionModel"),
      std::string::npos)
      << model;
  const std::string missing = refusal(R"({"_class_name": "ToyPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"]})");
  EXPECT_NE(missing.find("has no transformer; a ToyPipeline needs it"), std::string::npos) << missing;
  const std::string cut = refusal(R"({"_class_name": "ToyPipe)");
  EXPECT_NE(cut.find("model_index.json: not JSON"), std::string::npos) << cut;
}

}  // namespace
}  // namespace md
