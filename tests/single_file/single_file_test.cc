// Single files of the original layout compared with folders of the same models: opened, sampled, trained, converted.
// The expected contents are recorded from diffusers (tools/golden/single_files.py).
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/safetensors.h"
#include "maxdiffusion/checkpoint/test_processes.h"
#include "maxdiffusion/families/model_weights.h"
#include "maxdiffusion/families/open_model.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/model_folder/single_file.h"
#include "maxdiffusion/models/unet2d.h"
#include "tests/cli/command.h"
#include "tests/single_file/models.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
const std::string kGolden = MD_SOURCE_DIR "/tests/golden";

void expect_same(const HostArrays& got, const HostArrays& want) {
  for (const auto& [name, array] : want) {
    const auto found = got.find(name);
    ASSERT_TRUE(found != got.end()) << name << " is missing";
    EXPECT_EQ(to_string(found->second.shape()), to_string(array.shape())) << name;
    EXPECT_TRUE(std::equal(array.data(), array.data() + array.bytes(), found->second.data())) << name;
  }
  for (const auto& [name, array] : got) EXPECT_TRUE(want.contains(name)) << name << " is too much";
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

// --- Published sizes, headers alone ----------------------------------------------------------------------------------

/// Parses lines "name sizes"; "layers.{0..n}." is expanded to layers.0. to layers.n.
std::map<std::string, Dims> published(const std::string& model) {
  std::istringstream text(read_file(kGolden + "/single_file/published/" + model + ".txt"));
  std::map<std::string, Dims> out;
  for (std::string line; std::getline(text, line);) {
    const size_t space = line.find(' '), open = line.find("{0.."), close = line.find('}');
    std::istringstream sizes(line.substr(space + 1));
    Dims dims;
    for (std::string size; std::getline(sizes, size, 'x');) dims.push_back(std::stoll(size));
    const std::string name = line.substr(0, space);
    if (open == std::string::npos) {
      out[name] = dims;
      continue;
    }
    for (int i = 0; i <= std::stoi(line.substr(open + 4)); ++i)
      out[name.substr(0, open) + std::to_string(i) + name.substr(close + 1)] = dims;
  }
  return out;
}

/// Writes a sparse file with such tensors, all zeros, which uses no disk space.
void write_sparse(const std::string& path, const std::map<std::string, Dims>& tensors) {
  json header;
  int64_t at = 0;
  for (const auto& [name, dims] : tensors) {
    const int64_t end = at + Shape{DType::f16, dims}.bytes();
    header[name] = {{"dtype", "F16"}, {"shape", dims}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << text;
  fs::resize_file(path, 8 + length + static_cast<uint64_t>(at));
}

struct Published {
  const char *model, *pipeline, *layout, *prediction;
  std::map<std::string, Dims> extra;  // additional tensors in published files
};
void PrintTo(const Published& p, std::ostream* os) { *os << p.model; }

class PublishedFile : public testing::TestWithParam<Published> {};

// P-15
TEST_P(PublishedFile, IsRecognizedByItsTensorsAndReadToTheLast) {
  const Published& p = GetParam();
  TemporaryFolder t;
  std::map<std::string, Dims> tensors = published(p.model);
  tensors.insert(p.extra.begin(), p.extra.end());
  write_sparse(t / "model.safetensors", tensors);
  testing::internal::CaptureStderr();
  const ModelFolder folder = ModelFolder::open(t / "model.safetensors");
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(folder.pipeline(), p.pipeline);
  EXPECT_TRUE(contains(log, std::string(p.layout) + "; not read: ")) << log;
  const auto noise = parse_json(folder.scheduler_config());
  EXPECT_EQ(noise.at("prediction_type"), p.prediction);
  // OpenCLIP and SDXL's second encoder pad with "!".
  if (folder.has("text_encoder")) {
    EXPECT_EQ(folder.tokenizer("tokenizer")->size(), 49408);
    EXPECT_EQ(folder.tokenizer("tokenizer")->pad_id(), p.model == std::string("sd21") ? 0 : 49407);
  }
  if (folder.has("text_encoder_2")) {
    EXPECT_EQ(folder.tokenizer("tokenizer_2")->pad_id(), 0);
  }

  if (p.model != std::string("sd15")) return;  // the rest is the same for all models
  tensors.erase("model.diffusion_model.out.2.bias");
  write_sparse(t / "model.safetensors", tensors);
  std::string e = error_of([&] { ModelFolder::open(t / "model.safetensors"); });
  EXPECT_TRUE(contains(e, "missing: conv_out.bias")) << e;
  tensors["model.diffusion_model.out.2.bias"] = {4};
  tensors["first_stage_model.decoder.adapter.weight"] = {4};
  write_sparse(t / "model.safetensors", tensors);
  e = error_of([&] { ModelFolder::open(t / "model.safetensors"); });
  EXPECT_TRUE(contains(e, "unused: first_stage_model.decoder.adapter.weight")) << e;
  tensors.erase("first_stage_model.decoder.adapter.weight");
  tensors["control_lllite.weight"] = {4};
  write_sparse(t / "model.safetensors", tensors);
  e = error_of([&] { ModelFolder::open(t / "model.safetensors"); });
  EXPECT_TRUE(contains(e, "1 of its tensors are not part of it: control_lllite.weight")) << e;
}

const std::map<std::string, Dims> kSchedule = {{"betas", {1000}},
                                               {"alphas_cumprod", {1000}},
                                               {"model_ema.decay", {1}},
                                               {"model_ema.num_updates", {1}},
                                               {"posterior_mean_coef1", {1000}}};
std::map<std::string, Dims> with(std::map<std::string, Dims> extra) {
  extra.insert(kSchedule.begin(), kSchedule.end());
  return extra;
}

INSTANTIATE_TEST_SUITE_P(
    Models, PublishedFile,
    testing::Values(Published{"sd15", "StableDiffusionPipeline", "Stable Diffusion 1.x", "epsilon",
                              with({{"cond_stage_model.transformer.text_model.embeddings.position_ids", {1, 77}},
                                    {"model_ema.diffusion_modelout2bias", {4}}})},
                    Published{"sd21", "StableDiffusionPipeline", "Stable Diffusion 2.x", "v_prediction",
                              with({{"cond_stage_model.model.logit_scale", {}},
                                    {"cond_stage_model.model.text_projection", {1024, 1024}},
                                    {"cond_stage_model.model.transformer.resblocks.23.ln_1.weight", {1024}}})},
                    Published{"sdxl",
                              "StableDiffusionXLPipeline",
                              "SDXL",
                              "epsilon",
                              {{"conditioner.embedders.1.model.logit_scale", {}},
                               {"denoiser.sigmas", {1000}},
                               {"conditioner.embedders.0.transformer.text_model.embeddings.position_ids", {1, 77}}}},
                    Published{"refiner",
                              "StableDiffusionXLImg2ImgPipeline",
                              "SDXL's refiner",
                              "epsilon",
                              {{"conditioner.embedders.0.model.logit_scale", {}}, {"denoiser.sigmas", {1000}}}}),
    [](const auto& info) { return std::string(info.param.model); });

// P-15
TEST(SingleFile, OfModelsThatAreNotReadAreRefusedByName) {
  TemporaryFolder t;
  const std::string file = t / "model.safetensors";
  auto refusal = [&](const std::map<std::string, Dims>& tensors) {
    write_sparse(file, tensors);
    return error_of([&] { ModelFolder::open(file); });
  };
  std::map<std::string, Dims> tensors = published("sd15");
  tensors["model.diffusion_model.input_blocks.0.0.weight"] = {320, 9, 3, 3};
  EXPECT_EQ(refusal(tensors), "no error");  // an inpainting model
  EXPECT_EQ(ModelFolder::open(file).config<UNetConfig>("unet").in_channels, 9);
  tensors["model.diffusion_model.input_blocks.0.0.weight"] = {320, 8, 3, 3};
  EXPECT_TRUE(contains(refusal(tensors), "a model with 8 input channels (pix2pix, upscaling)")) << refusal(tensors);
  const std::string lone = refusal({{"decoder.conv_in.weight", {4}}});
  EXPECT_TRUE(
      contains(lone,
               "not a file of a whole model in the original layout of SDXL, SDXL's refiner, Stable Diffusion 2.x, "
               "Stable Diffusion 1.x"))
      << lone;
  EXPECT_TRUE(contains(lone, "vae_file")) << lone;
  std::ofstream(t / "model.ckpt") << "PK";
  const std::string pickled = error_of([&] { ModelFolder::open(t / "model.ckpt"); });
  EXPECT_TRUE(contains(pickled, "a pickled file")) << pickled;
  EXPECT_TRUE(contains(pickled, "save_file")) << pickled;
}

TEST(SingleFile, OfVersion2PredictsNoiseWhereItsStepsSaySoAndSdxlVelocityWhereATensorDoes) {
  TemporaryFolder t;
  std::map<std::string, Dims> tensors = published("sdxl");
  tensors["v_pred"] = {}, tensors["ztsnr"] = {};
  write_sparse(t / "xl.safetensors", tensors);
  const auto noise = parse_json(ModelFolder::open(t / "xl.safetensors").scheduler_config());
  EXPECT_EQ(noise.at("prediction_type"), "v_prediction");
  EXPECT_EQ(noise.at("rescale_betas_zero_snr"), true);

  // The layout reads the value of global_step, so a real file is needed: the tiny model's, in which all other tensors
  // have unrelated sizes.
  write_folder("sd2", t / "folder");
  HostArrays tiny = original_of_folder("sd2", t / "folder");
  const SingleFileLayout& layout = find_single_file_layout("base", tiny);
  auto prediction = [&](std::optional<float> steps) {
    if (steps) tiny["global_step"] = HostArray::of<float>({DType::f32, {}}, {&*steps, 1});
    write_safetensors(t / "base.safetensors", tiny);
    const HostArrays read = SafetensorsReader::open(t / "base.safetensors").tensors();
    return parse_json(layout.texts(read).at("scheduler/scheduler_config.json")).at("prediction_type");
  };
  EXPECT_EQ(prediction({}), "v_prediction");
  EXPECT_EQ(prediction(110000), "v_prediction");
  EXPECT_EQ(prediction(875000), "epsilon");
  const std::string e = error_of([&] { ModelFolder::open(t / "base.safetensors"); });
  EXPECT_TRUE(contains(e, "single_file_config=FOLDER")) << e;
}

TEST(SingleFile, WhoseMarksSayVelocityPredictsItWhateverItsConfigsSay) {
  const TemporaryFolder t;
  const HostArray one = HostArray::of<float>({DType::f32, {}}, {{1.0F}});
  for (const char* which : {"sd", "sdxl"}) {
    const std::string folder = t / fmt::format("{}_folder", which), file = t / fmt::format("{}.safetensors", which);
    write_folder(which, folder);
    using Noise = std::pair<std::string, bool>;
    const auto noise_of = [](const ModelFolder& opened) {
      const auto config = parse_json(opened.scheduler_config());
      return Noise(config.value("prediction_type", "epsilon"), config.value("rescale_betas_zero_snr", false));
    };
    HostArrays tensors = original_of_folder(which, folder);
    write_safetensors(file, tensors);
    EXPECT_EQ(noise_of(ModelFolder::open(file, {.single_file_config = folder})), Noise("epsilon", false));
    tensors["v_pred"] = tensors["ztsnr"] = one;
    write_safetensors(file, tensors);
    testing::internal::CaptureStderr();
    EXPECT_EQ(noise_of(ModelFolder::open(file, {.single_file_config = folder})), Noise("v_prediction", true));
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(contains(log, "holds the tensor v_pred: prediction_type is \"v_prediction\", not \"epsilon\"")) << log;
    // The same file in place of the folder's denoiser.
    ModelKeys keys;
    keys.unet_checkpoint = file;
    EXPECT_EQ(noise_of(open_model(folder, keys, {.purpose = Purpose::sampling}).folder), Noise("v_prediction", true));
    tensors.erase("v_pred"), tensors.erase("ztsnr");
    write_safetensors(file, tensors, {{"modelspec.prediction_type", "v"}});
    testing::internal::CaptureStderr();
    EXPECT_EQ(noise_of(ModelFolder::open(file, {.single_file_config = folder})), Noise("epsilon", false));
    const std::string messages = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(contains(messages, "modelspec.prediction_type v") && contains(messages, "prediction_type=v_prediction"))
        << messages;
  }
  // Without a folder of configs.
  std::map<std::string, Dims> published_1 = published("sd15");
  published_1["v_pred"] = {};
  write_sparse(t / "sd15.safetensors", published_1);
  EXPECT_EQ(parse_json(ModelFolder::open(t / "sd15.safetensors").scheduler_config()).at("prediction_type"),
            "v_prediction");
}

// --- Tiny models, whole ----------------------------------------------------------------------------------------------

class Models : public testing::TestWithParam<const char*> {
 protected:
  Models() { write_folder(GetParam(), folder); }
  /// Latents or media of a program run with these words.
  HostArray generate(const std::string& name, std::vector<std::string> words, const std::string& command = "generate") {
    words.insert(words.begin(),
                 {command, MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + (t / name),
                  "prompt=red heart", "height=16", "width=16", "num_inference_steps=2", "output_type=np", "seed=3"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return o.status == 0 ? SafetensorsReader::open(t / name + "/images.safetensors").tensors().at("images")
                         : HostArray();
  }
  Outcome convert(const std::string& from, const std::string& to, std::vector<std::string> words) {
    words.insert(words.begin(), {"convert", from, to});
    return maxdiffusion(words);
  }
  /// Trains two steps and returns the checkpoint.
  std::string train(const std::string& name, std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + t.path(), "run_name=" + name,
                  "max_train_steps=2", "dataset_type=synthetic", "synthetic_num_samples=2", "per_device_batch_size=2",
                  "resolution=16", "cache_latents_text_encoder_outputs=true"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    return t / name + "/checkpoints/2";
  }
  TemporaryFolder t;
  const std::string folder = t / "folder", file = t / "file.safetensors";
};

/// Expects arrays equal to the bit.
void expect_equal(const HostArray& a, const HostArray& b) {
  ASSERT_TRUE(a && b);
  ASSERT_EQ(a.dims(), b.dims());
  EXPECT_TRUE(std::equal(a.data(), a.data() + a.bytes(), b.data()));
}

// P-15
TEST_P(Models, InOneFileSampleAsTheirFolderDoes) {
  write_safetensors(file, original_of_folder(GetParam(), folder));
  const HostArray expected = generate("a", {"pretrained_model_name_or_path=" + folder});
  expect_equal(generate("b", {"pretrained_model_name_or_path=" + file, "single_file_config=" + folder}), expected);

  // convert turns the file into the folder, and that folder into the same file.
  Outcome o = convert(file, t / "made", {"format=diffusers", "single_file_config=" + folder});
  ASSERT_EQ(o.status, 0) << o.err;
  expect_same(weights_of_folder(t / "made"), weights_of_folder(folder));
  expect_equal(generate("c", {"pretrained_model_name_or_path=" + (t / "made")}), expected);
  o = convert(t / "made", t / "again.safetensors", {"format=single_file"});
  ASSERT_EQ(o.status, 0) << o.err;
  expect_same(SafetensorsReader::open(t / "again.safetensors").tensors(), SafetensorsReader::open(file).tensors());
  EXPECT_EQ(convert(t / "made", t / "again.safetensors", {"format=single_file"}).status, 2) << "it is there already";
}

TEST_P(Models, OfOneFileAreReadFromTheFileThatWasOpenedOnce) {
  write_safetensors(file, original_of_folder(GetParam(), folder));
  const ModelFolder opened = ModelFolder::open(file, {.single_file_config = folder});
  const ModelWeights weights = ModelWeights::for_sampling(opened, *make_family(opened), {}, 0);
  fs::remove(file);
  for (const auto& [name, component] : opened.components())
    EXPECT_FALSE(weights.read(opened.params(name), name).empty()) << name;
}

TEST_P(Models, AreReadFromAFileWithoutTheAutoencoderThatVaeFileGives) {
  HostArrays rest, coder;
  for (const auto& [name, array] : original_of_folder(GetParam(), folder))
    (name.starts_with("first_stage_model.") ? coder : rest)[name] = array;
  ASSERT_FALSE(coder.empty());
  write_safetensors(file, rest);
  write_safetensors(t / "vae.safetensors", coder);
  const std::vector<std::string> model = {"pretrained_model_name_or_path=" + file, "single_file_config=" + folder};
  std::vector<std::string> whole = model;
  whole.push_back("vae_file=" + (t / "vae.safetensors"));
  expect_equal(generate("a", whole), generate("b", {"pretrained_model_name_or_path=" + folder}));
  for (const char* command : {"generate", "train"}) {
    std::vector<std::string> words = {command,         MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                                      "prompt=red",    "output_dir=" + (t / "c"),
                                      "run_name=none", "dataset_type=synthetic"};
    words.insert(words.end(), model.begin(), model.end());
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 2) << o.err;
    EXPECT_TRUE(contains(o.err, "'" + file + "' holds no autoencoder (vae, of class AutoencoderKL)")) << o.err;
    EXPECT_TRUE(contains(o.err, "try: vae_file=FILE")) << o.err;
  }
  const Outcome o = convert(file, t / "made", {"format=diffusers", "single_file_config=" + folder});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "holds no autoencoder (vae, of class AutoencoderKL)")) << o.err;
}

INSTANTIATE_TEST_SUITE_P(Kinds, Models, testing::Values("sd", "sd2", "sdxl", "refiner"),
                         [](const auto& info) { return std::string(info.param); });

TEST(SingleFile, MayLackItsOnlyTextEncoderWithAFolderOfConfigs) {
  const TemporaryFolder t;
  const std::string folder = t / "folder", file = t / "file.safetensors";
  write_folder("sd", folder);
  HostArrays rest = original_of_folder("sd", folder);
  std::erase_if(rest, [](const auto& item) { return item.first.starts_with("cond_stage_model."); });
  rest["embedding_manager.string_to_param_dict.*"] = HostArray::of<float>({DType::f32, {1}}, {{1.0F}});
  write_safetensors(file, rest);
  const ModelFolder opened = ModelFolder::open(file, {.single_file_config = folder});
  EXPECT_EQ(opened.components().at("text_encoder").weights, "");
  EXPECT_EQ(opened.components().at("unet").weights, file);
  const auto family = make_family(opened);
  ModelKeys keys;
  const std::string none = error_of([&] { ModelWeights::for_sampling(opened, *family, keys, 0); });
  EXPECT_TRUE(contains(none, "try: clip_model_name_or_path=FILE")) << none;
  keys.clip_model_name_or_path = folder;
  EXPECT_EQ(ModelWeights::for_sampling(opened, *family, keys, 0).location("text_encoder"), folder + "/text_encoder");
  const std::string e = error_of([&] { ModelFolder::open(file); });
  EXPECT_TRUE(contains(e, "a UNet and no text encoder") && contains(e, "try: single_file_config=FOLDER")) << e;
}

TEST(SingleFile, OfSdxlMayLackTheTextEncoderThatAKeyGives) {
  const TemporaryFolder t;
  const std::string folder = t / "folder", file = t / "file.safetensors";
  write_folder("sdxl", folder);
  HostArrays rest = original_of_folder("sdxl", folder);
  std::erase_if(rest, [](const auto& item) { return item.first.starts_with("conditioner.embedders.0."); });
  write_safetensors(file, rest);
  const ModelFolder opened = ModelFolder::open(file, {.single_file_config = folder});
  EXPECT_EQ(opened.components().at("text_encoder").weights, "");
  EXPECT_EQ(opened.components().at("text_encoder_2").weights, file);
  const auto family = make_family(opened);
  const std::string e = error_of([&] { ModelWeights::for_sampling(opened, *family, {}, 0); });
  EXPECT_TRUE(contains(e, "holds no text encoder (text_encoder, of class CLIPTextModel)")) << e;
  EXPECT_TRUE(contains(e, "try: clip_model_name_or_path=FILE")) << e;
  ModelKeys keys;
  keys.clip_model_name_or_path = folder;
  const ModelWeights weights = ModelWeights::for_sampling(opened, *family, keys, 0);
  EXPECT_EQ(weights.location("text_encoder"), folder + "/text_encoder");
}

// --- Transformers ----------------------------------------------------------------------------------------------------

struct Checkpoint {
  const char* folder;  // below tests/golden
  const char* layout;
  std::map<std::string, std::string> encoders;  // component → its name in ComfyUI's checkpoints
};
void PrintTo(const Checkpoint& c, std::ostream* os) { *os << c.folder; }

/// A folder's models in one file, as ComfyUI's checkpoints have them.
class Checkpoints : public testing::TestWithParam<Checkpoint> {
 protected:
  void SetUp() override {
    fs::copy(kGolden + "/" + GetParam().folder, folder, fs::copy_options::recursive);
    HostArrays all;
    for (const auto& [component, prefix] : {std::pair{"transformer", "model.diffusion_model."}, {"vae", "vae."}}) {
      const std::string part = t / (std::string(component) + ".safetensors");
      const Outcome o = maxdiffusion({"convert", folder, part, std::string("component=") + component});
      ASSERT_EQ(o.status, 0) << o.err;
      for (const auto& [name, array] : SafetensorsReader::open(part).tensors()) all[prefix + name] = array;
    }
    for (const auto& [component, name_of] : GetParam().encoders)
      for (const auto& [name, array] : SafetensorsReader::open(folder + "/" + component).tensors())
        all["text_encoders." + name_of + ".transformer." + name] = array;
    write_safetensors(file, all);
  }
  HostArray generate(std::vector<std::string> words) {
    words.insert(words.begin(),
                 {"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + (t / "images"),
                  "prompt=red heart", "height=32", "width=32", "num_frames=1", "num_inference_steps=1",
                  "output_type=np", "seed=3", "max_sequence_length=12"});
    const Outcome o = maxdiffusion(words);
    EXPECT_EQ(o.status, 0) << o.err;
    if (o.status != 0) return {};
    const HostArrays made = SafetensorsReader::open(t / "images/images.safetensors").tensors();
    fs::remove_all(t / "images");
    return made.at("images");
  }
  TemporaryFolder t;
  const std::string folder = t / "folder", file = t / "file.safetensors";
};

TEST_P(Checkpoints, OfComfySampleAsTheirFolderDoes) {
  const HostArray expected = generate({"pretrained_model_name_or_path=" + folder});
  expect_equal(generate({"pretrained_model_name_or_path=" + file, "single_file_config=" + folder}), expected);
  std::string e = error_of([&] { ModelFolder::open(file); });
  EXPECT_TRUE(contains(e, std::string("recognized as ") + GetParam().layout)) << e;
  EXPECT_TRUE(contains(e, "try: single_file_config=FOLDER")) << e;

  // Each key takes its own model from the file.
  std::vector<std::string> words = {"pretrained_model_name_or_path=" + folder, "unet_checkpoint=" + file,
                                    "vae_file=" + file};
  std::vector<std::string> replaced = {"transformer", "vae"};
  for (const auto& [component, name] : GetParam().encoders)
    if (name == "clip_l" || name == "t5xxl") {
      words.push_back((name == "clip_l" ? "clip_model_name_or_path=" : "t5xxl_model_name_or_path=") + file);
      replaced.push_back(component);
    }
  for (const std::string& component : replaced)
    for (const auto& weights : fs::directory_iterator(folder + "/" + component))
      if (weights.path().extension() == ".safetensors") fs::remove(weights);
  expect_equal(generate(words), expected);
}

// With the scale of an input, the mark of the whole model and a tokenizer, none of which the weights need.
TEST_P(Checkpoints, OfComfyMayBeInScaledFloat8) {
  const std::string beginning = "model.diffusion_model.";
  HostArrays plain = SafetensorsReader::open(file).tensors();
  const auto matrix = std::ranges::find_if(plain, [&](const auto& item) {
    return item.first.starts_with(beginning) && item.first.ends_with(".weight") && item.second.dims().size() == 2;
  });
  ASSERT_NE(matrix, plain.end());
  const std::string name = matrix->first, module = name.substr(0, name.rfind('.'));
  HostArrays scaled = plain;
  const auto number = [](float v) { return HostArray::of<float>({DType::f32, {}}, {&v, 1}); };
  scaled[name] = plain.at(name).cast(DType::f8e4m3fn);
  HostArray doubled = scaled.at(name).cast(DType::f32);
  for (float& v : doubled.mutable_view<float>()) v *= 2;
  plain[name] = doubled;
  scaled[module + ".scale_weight"] = number(2);
  scaled[module + ".scale_input"] = number(1);
  scaled[beginning + "scaled_fp8"] = number(0);
  for (const auto& [component, encoder] : GetParam().encoders)
    scaled["text_encoders." + encoder + ".transformer.spiece_model"] =
        HostArray::of<char>({DType::u8, {3}}, {{1, 2, 3}});
  for (const auto& [to, tensors] : {std::pair{"plain", plain}, {"scaled", scaled}}) {
    write_safetensors(t / to + ".safetensors", tensors);
    const Outcome o = maxdiffusion({"convert", t / to + ".safetensors", t / to, "format=diffusers", "dtype=float32",
                                    "single_file_config=" + folder});
    ASSERT_EQ(o.status, 0) << o.err;
  }
  const HostArrays expected = SafetensorsReader::open(t / "plain/transformer").tensors(),
                   found = SafetensorsReader::open(t / "scaled/transformer").tensors();
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [tensor, array] : expected) expect_equal(found.at(tensor), array);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Checkpoints,
    testing::Values(Checkpoint{"flux/dev", "FLUX.1", {{"text_encoder", "clip_l"}, {"text_encoder_2", "t5xxl"}}},
                    Checkpoint{"zimage/base", "Z-Image", {{"text_encoder", "qwen3_4b"}}}),
    [](const auto& info) { return std::string(info.param.layout).substr(0, 4) == "FLUX" ? "Flux" : "ZImage"; });

class OneModel : public Models {};

// P-16
TEST_P(OneModel, InVariantsIsReadFromThem) {
  Outcome o = convert(folder, t / "half", {"format=diffusers", "dtype=float16"});
  ASSERT_EQ(o.status, 0) << o.err;
  for (const auto& [name, array] : weights_of_folder(t / "half")) EXPECT_EQ(array.dtype(), DType::f16) << name;
  const HostArray expected = generate("a", {"pretrained_model_name_or_path=" + (t / "half")});
  for (const char* part : {"unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"}) {
    const std::string stem = t / "half/" + std::string(part);
    fs::rename(stem + ".safetensors", stem + ".fp16.safetensors");
  }
  expect_equal(generate("b", {"pretrained_model_name_or_path=" + (t / "half")}), expected);  // found automatically
  // If plain files exist too, the key chooses.
  for (const char* part : {"unet/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"})
    fs::copy_file(folder + "/" + part + ".safetensors", t / "half/" + std::string(part) + ".safetensors");
  expect_equal(generate("c", {"pretrained_model_name_or_path=" + (t / "half"), "variant=fp16"}), expected);
  const HostArray plain = generate("d", {"pretrained_model_name_or_path=" + (t / "half")});
  expect_equal(plain, generate("e", {"pretrained_model_name_or_path=" + folder}));
  o = maxdiffusion({"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                    "pretrained_model_name_or_path=" + (t / "half"), "variant=fp8"});
  EXPECT_TRUE(contains(o.err, "no weights of the variant 'fp8'")) << o.err;
}

// P-16
TEST_P(OneModel, TakesItsAutoencoderFromAFileInEitherLayout) {
  const std::string other = t / "other";
  write_folder("sd", other);
  const std::string weights = other + "/vae/diffusion_pytorch_model.safetensors";
  HostArrays changed = SafetensorsReader::open(weights).tensors();
  HostArray bias(changed.at("decoder.conv_out.bias").shape());
  std::ranges::fill(bias.mutable_view<float>(), 0.25f);
  changed["decoder.conv_out.bias"] = bias;
  write_safetensors(weights, changed);
  const HostArray expected = generate("a", {"pretrained_model_name_or_path=" + other});
  HostArrays bare, original;
  for (const auto& [name, array] : original_of_folder("sd", other))
    if (const std::string prefix = "first_stage_model."; name.starts_with(prefix))
      bare[name.substr(prefix.size())] = original[name] = array;
  bare["loss.logvar"] = bare["decoder.norm_out.bias"];  // a tensor of its training loss
  write_safetensors(t / "bare.safetensors", bare);
  write_safetensors(t / "original.safetensors", original);
  for (const std::string& vae : {weights, t / "bare.safetensors", t / "original.safetensors", other})
    expect_equal(generate("b", {"pretrained_model_name_or_path=" + folder, "vae_file=" + vae}), expected);
  // convert can also write one component.
  const Outcome o = convert(other, t / "vae.safetensors", {"format=single_file", "component=vae"});
  ASSERT_EQ(o.status, 0) << o.err;
  bare.erase("loss.logvar");
  expect_same(SafetensorsReader::open(t / "vae.safetensors").tensors(), bare);
  ASSERT_EQ(
      convert(t / "vae.safetensors", t / "vae", {"format=diffusers", "component=vae", "single_file_config=" + folder})
          .status,
      0);
  expect_same(SafetensorsReader::open(t / "vae").tensors(), changed);
}

// P-16
TEST_P(OneModel, TakesAControlNetInOneFile) {
  const std::string control = kGolden + "/pipelines/controlnet";
  const Outcome o = convert(control, file, {"format=single_file"});
  ASSERT_EQ(o.status, 0) << o.err;
  const HostArrays tensors = SafetensorsReader::open(file).tensors();
  const HostArrays stored = SafetensorsReader::open(control + "/diffusion_pytorch_model.safetensors").tensors();
  int residuals = 0;
  for (; stored.contains(fmt::format("controlnet_down_blocks.{}.weight", residuals)); ++residuals)
    expect_equal(tensors.at(fmt::format("zero_convs.{}.0.weight", residuals)),
                 stored.at(fmt::format("controlnet_down_blocks.{}.weight", residuals)));
  EXPECT_GT(residuals, 2);
  expect_equal(tensors.at("middle_block_out.0.weight"), stored.at("controlnet_mid_block.weight"));
  HostArrays prefixed;
  for (const auto& [name, array] : tensors) prefixed["control_model." + name] = array;
  write_safetensors(t / "prefixed.safetensors", prefixed);
  HostArray image(Shape{DType::u8, {16, 16, 3}});
  std::ranges::fill(image.mutable_view<uint8_t>(), uint8_t{90});
  write_png(t / "control.png", image);
  auto with = [&](const std::string& where) {
    return generate("a",
                    {"pretrained_model_name_or_path=" + folder, "controlnet_model_name_or_path=" + where,
                     "controlnet_image=" + (t / "control.png")},
                    "generate_controlnet");
  };
  const HostArray expected = with(control);
  for (const std::string& one : {file, t / "prefixed.safetensors", control + "/diffusion_pytorch_model.safetensors"})
    expect_equal(with(one), expected);
}

// P-15
TEST_P(OneModel, IsTrainedFromItsFileAsFromItsFolder) {
  write_safetensors(file, original_of_folder(GetParam(), folder));
  const std::string a = train("of_folder", {"pretrained_model_name_or_path=" + folder}),
                    b = train("of_file", {"pretrained_model_name_or_path=" + file, "single_file_config=" + folder});
  expect_same(weights_of_folder(b), weights_of_folder(a));
  EXPECT_EQ(read_file(b + "/model_index.json"), read_file(a + "/model_index.json"));
  EXPECT_TRUE(exists(b + "/tokenizer/vocab.json"));
  // The run's checkpoint needs no keys for the file.
  const Outcome o = maxdiffusion(
      {"generate", t / "of_file/config.yml", "prompt=red", "num_inference_steps=1", "height=16", "width=16"});
  EXPECT_EQ(o.status, 0) << o.err;
}

// P-16
TEST_P(OneModel, IsTrainedWithAnotherAutoencoderWhichItsCheckpointHolds) {
  const std::string other = t / "other", weights = other + "/vae/diffusion_pytorch_model.safetensors",
                    config = other + "/vae/config.json";
  write_folder("sd", other);
  HostArrays changed = SafetensorsReader::open(weights).tensors();
  HostArray bias(changed.at("encoder.conv_out.bias").shape());
  std::ranges::fill(bias.mutable_view<float>(), 0.5f);
  changed["encoder.conv_out.bias"] = bias;
  write_safetensors(weights, changed);
  json sizes = parse_json(read_file(config));
  sizes["scaling_factor"] = 0.75;
  write_file_atomic(config, sizes.dump());
  HostArrays original;
  for (const auto& [name, array] : original_of_folder("sd", other))
    if (name.starts_with("first_stage_model.")) original[name] = array;
  write_safetensors(file, original);

  const std::string model = "pretrained_model_name_or_path=" + folder, plain = train("plain", {model}),
                    of_file = train("of_file", {model, "vae_file=" + file}),
                    of_folder = train("of_folder", {model, "vae_file=" + other});
  auto tensors = [](const std::string& part) { return SafetensorsReader::open(part).tensors(); };
  for (const std::string& run : {of_file, of_folder}) expect_same(tensors(run + "/vae"), changed);
  expect_same(tensors(plain + "/vae"), tensors(folder + "/vae"));
  // A single file uses the model's config, a folder its own.
  auto scale = [](const std::string& run) {
    return parse_json(read_file(run + "/vae/config.json")).at("scaling_factor").get<double>();
  };
  EXPECT_EQ(scale(of_file), scale(folder));
  EXPECT_EQ(scale(of_folder), 0.75);
  // All three trained on different latents.
  auto trained = [&](const std::string& run) { return tensors(run + "/unet").at("conv_in.weight").to_doubles(); };
  EXPECT_NE(trained(plain), trained(of_file));
  EXPECT_NE(trained(of_file), trained(of_folder));
  // A checkpoint is a complete folder with the autoencoder that was used.
  expect_equal(
      generate("a", {"pretrained_model_name_or_path=" + of_folder}),
      generate("b", {"pretrained_model_name_or_path=" + plain, "vae_file=" + other, "unet_checkpoint=" + of_folder}));

  for (const auto& [news, named] : {std::pair{"train_new_vae", "vae_file"}, {"train_new_unet", "unet_checkpoint"}}) {
    const Outcome o = maxdiffusion({"train", MD_SOURCE_DIR "/tests/pipelines/generate.yml", "output_dir=" + t.path(),
                                    "run_name=both", model, std::string(news) + "=true", named + ("=" + other),
                                    "max_train_steps=1", "dataset_type=synthetic", "resolution=16"});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, fmt::format("{} cannot be combined with {}", news, named))) << o.err;
  }
}

// P-18
TEST_P(OneModel, OfARunIsWrittenAsOneFileWithItsAveragesOrWithWhatWasTrained) {
  const std::string run =
      train("run", {"pretrained_model_name_or_path=" + folder, "ema_decay=0.5", "learning_rate=0.01"});
  const HostArrays averaged = original_of_folder("sd", run),
                   state = SafetensorsReader::open(run + "/training_state/arrays.safetensors").tensors();
  const std::string bare = t / "trained";
  fs::copy(run, bare, fs::copy_options::recursive);
  HostArrays unet = SafetensorsReader::open(run + "/unet").tensors();
  for (auto& [name, array] : unet) array = state.at("unet/" + name);
  write_safetensors(bare + "/unet/diffusion_pytorch_model.safetensors", unet);
  const HostArrays trained = original_of_folder("sd", bare);
  for (const auto& [name, array] : averaged)
    EXPECT_EQ(array.to_doubles() == trained.at(name).to_doubles(), !name.starts_with("model.diffusion_model.")) << name;
  for (const auto& [place, words, expected] :
       std::vector<std::tuple<std::string, std::string, const HostArrays*>>{{t / "run", "ema=true", &averaged},
                                                                            {t / "run", "ema=false", &trained},
                                                                            {run + "/", "ema=false", &trained}}) {
    const Outcome o = convert(place, file, {"format=single_file", words});
    ASSERT_EQ(o.status, 0) << o.err;
    expect_same(SafetensorsReader::open(file).tensors(), *expected);
    fs::remove(file);
  }
}

TEST_P(OneModel, OfAShardedCheckpointIsMergedAndSampled) {
  const std::string run =
      train("run", {"pretrained_model_name_or_path=" + folder, "ema_decay=0.5", "learning_rate=0.01"});
  // As written by three processes: each has a third of the rows of all trained arrays whose row count is divisible.
  const std::string shards = t / "pieces";
  const CheckpointContent state = read_training_state(run);
  const HostArrays unet = SafetensorsReader::open(run + "/unet").tensors();
  const auto errors = as_processes(3, [&](const CheckpointProcesses& of) {
    const auto part = [&](const ShardedArray& whole) {
      const Dims& dims = whole.shape.dims;
      if (dims.empty() || dims[0] % 3 != 0) return of.process == 0 ? whole : ShardedArray(whole.shape, {});
      Slice s = Slice::all(dims);
      s.size[0] /= 3;
      s.start[0] = of.process * s.size[0];
      return ShardedArray(whole.shape, {{s, whole.read(s)}});
    };
    CheckpointContent c;
    for (const auto& [name, a] : state.state) c.state[name] = part(a);
    for (const auto& [name, a] : unet) c.weights["unet"][name] = part(a);
    for (const auto& f : fs::recursive_directory_iterator(run)) {
      const std::string name = fs::relative(f.path(), run);
      if (f.is_regular_file() && !name.starts_with("training_state/") &&
          !name.ends_with("unet/diffusion_pytorch_model.safetensors"))
        c.linked[name] = f.path();
    }
    c.state_json = state.state_json;
    write_checkpoint(shards, 2, c, of);
  });
  ASSERT_EQ(errors, std::vector<std::string>(3));
  ASSERT_FALSE(exists(shards + "/2/unet/diffusion_pytorch_model.safetensors"));

  const Outcome refused =
      maxdiffusion({"generate", MD_SOURCE_DIR "/tests/pipelines/generate.yml",
                    "pretrained_model_name_or_path=" + shards + "/2", "output_dir=" + t.path(), "prompt=a"});
  EXPECT_NE(refused.status, 0);
  EXPECT_TRUE(contains(refused.err, "try: maxdiffusion convert " + shards + "/2 FOLDER")) << refused.err;
  for (const std::string words : {"ema=true", "ema=false", "dtype=bfloat16"}) {
    SCOPED_TRACE(words);
    const std::string a = t / "a_" + words, b = t / "b_" + words;
    for (const auto& [from, to] : {std::pair{run, a}, std::pair{shards + "/2", b}}) {
      const Outcome o = convert(from, to, {words});
      ASSERT_EQ(o.status, 0) << o.err;
    }
    size_t files = 0;
    for (const auto& f : fs::recursive_directory_iterator(a)) {
      if (!f.is_regular_file()) continue;
      EXPECT_EQ(read_file(f.path()), read_file(b + "/" + fs::relative(f.path(), a).string())) << f.path();
      ++files;
    }
    EXPECT_GT(files, 10u);
  }
  const std::string one = t / "one.safetensors", other = t / "other.safetensors";
  for (const auto& [from, to] : {std::pair{run, one}, std::pair{shards + "/2", other}})
    ASSERT_EQ(convert(from, to, {}).status, 0);
  EXPECT_EQ(read_file(one), read_file(other));
  expect_equal(generate("made", {"pretrained_model_name_or_path=" + (t / "b_ema=true")}),
               generate("plain", {"pretrained_model_name_or_path=" + run}));
}

INSTANTIATE_TEST_SUITE_P(Sd, OneModel, testing::Values("sd"), [](const auto& info) { return std::string(info.param); });

TEST(Convert, RefusesPlacesInItsInputAndNamesOfFilesThatItDoesNotWrite) {
  const TemporaryFolder t;
  const std::string model = t / "model";
  fs::copy(MD_SOURCE_DIR "/tests/golden/pipelines/sd", model, fs::copy_options::recursive);
  Outcome o = maxdiffusion({"convert", model + "/", model + "/unet/x"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "/unet/x' is inside of '" + model)) << o.err;
  EXPECT_FALSE(exists(model + "/unet/x"));
  o = maxdiffusion({"convert", model, t / "x.ckpt"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "/x.ckpt': .ckpt files are not written; expected a name that ends in .safetensors"))
      << o.err;
  EXPECT_FALSE(exists(t / "x.ckpt"));
  EXPECT_EQ(maxdiffusion({"convert", model, t / "model_2", "component=vae"}).status, 0) << "a name that begins alike";
}

// P-18
TEST(Convert, TakesAveragesOfACheckpointOrWhatWasTrained) {
  TemporaryFolder t;
  write_folder("sd", t / "folder");
  write_folder("sd", t / "more");  // the trained model
  CheckpointContent content;
  HostArrays extra;
  for (const auto& [name, array] : weights_of_folder(t / "folder")) {
    const size_t slash = name.find('/');
    content.weights[name.substr(0, slash)][name.substr(slash + 1)] = array;
    if (!name.starts_with("unet/")) continue;
    content.state["ema/" + name] = array;
    HostArray trained(array.shape());
    std::ranges::transform(array.view<float>(), trained.mutable_view<float>().begin(), [](float v) { return v + 1; });
    // Narrow weights are saved only as their master weights.
    content.state[(extra.size() % 2 == 0 ? "master/" : "") + name] = extra[name.substr(slash + 1)] = trained;
  }
  write_safetensors(t / "more/unet/diffusion_pytorch_model.safetensors", extra);
  const ModelFolder folder = ModelFolder::open(t / "folder");
  content.files = folder.files();
  content.files.merge(folder.tokenizer_files());
  content.state_json = "{}";
  write_checkpoint(t / "run/checkpoints", 7, content);
  for (const auto& [word, folder] : {std::pair{"ema=true", "folder"}, {"ema=false", "more"}}) {
    const Outcome o = maxdiffusion({"convert", t / "run", t / word + ".safetensors", "format=single_file", word});
    ASSERT_EQ(o.status, 0) << o.err;
    expect_same(SafetensorsReader::open(t / word + ".safetensors").tensors(), original_of_folder("sd", t / folder));
  }
  EXPECT_EQ(maxdiffusion({"convert", t / "folder", t / "x", "format=diffusers", "ema=false"}).status, 2);
  EXPECT_FALSE(exists(t / "x"));
}

}  // namespace
}  // namespace md
