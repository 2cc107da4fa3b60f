// The parts of a model folder that are not models: tokenizers by their class, the image processor.
#include "maxdiffusion/model_folder/model_folder.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/families/family.h"

namespace md {
namespace {

using nlohmann::json;

class Folder : public testing::Test {
 protected:
  Folder() {
    write("scheduler/scheduler_config.json", R"({"_class_name": "DDIMScheduler"})");
    index["scheduler"] = {"diffusers", "DDIMScheduler"};
  }
  void write(const std::string& file, const std::string& text) {
    make_folders(std::filesystem::path(t / file).parent_path().string());
    write_file_atomic(t / file, text);
  }
  ModelFolder open() {
    write("model_index.json", index.dump());
    return ModelFolder::open(t.path());
  }
  std::string refusal() {
    try {
      open();
    } catch (const Error& e) {
      return e.what();
    }
    return "opened";
  }

  TemporaryFolder t;
  json index = {{"_class_name", "SomePipeline"}};
};

TEST_F(Folder, TokenizersAreThoseThatTheIndexNames) {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/data/t5/whole", t / "tokenizer");
  index["tokenizer"] = {"transformers", "T5TokenizerFast"};
  index["tokenizer_2"] = {"transformers", "CLIPTokenizer"};
  const ModelFolder m = open();
  EXPECT_EQ(m.tokenizer("tokenizer")->tokens("hello world", 9), (std::vector<int32_t>{48, 74, 1}));
  EXPECT_EQ(m.tokenizer("tokenizer_2")->end_id(), 49407);  // the folder is missing: the published vocabulary
  const auto files = m.tokenizer_files();
  for (const char* file : {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"})
    EXPECT_EQ(files.at(file), read_file(t / file));
  EXPECT_TRUE(files.contains("tokenizer_2/vocab.json"));
}

TEST_F(Folder, OfTwoTextEncodersWhoseClassHasOneIsRefused) {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/pipelines/sdxl", t / "sdxl",
                        std::filesystem::copy_options::recursive);
  const std::string file = t / "sdxl/model_index.json";
  EXPECT_NE(make_family(ModelFolder::open(t / "sdxl")), nullptr);
  json whole = parse_json(read_file(file));
  whole["_class_name"] = "StableDiffusionPipeline";
  write_file_atomic(file, whole.dump());
  try {
    make_family(ModelFolder::open(t / "sdxl"));
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()), file +
                                         ": a StableDiffusionPipeline has one text encoder, but the folder has "
                                         "text_encoder_2; expected _class_name StableDiffusionXLPipeline");
  }
}

TEST_F(Folder, TokenizersOfNoClassOfOursAreThoseThatTheirOwnConfigNames) {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/data/t5/whole", t / "tokenizer");
  index["tokenizer"] = {"transformers", "TokenizersBackend"};
  EXPECT_EQ(open().tokenizer("tokenizer")->size(), 180);
  index["tokenizer"] = {"transformers", "WordPieces"};
  write("tokenizer/tokenizer_config.json", R"({"tokenizer_class": "WordPieces"})");
  EXPECT_NE(refusal().find("the class of tokenizer is 'WordPieces'; expected one of: UNet2DConditionModel"),
            std::string::npos);
  EXPECT_NE(refusal().find("CLIPTokenizer, CLIPTokenizerFast, T5Tokenizer, T5TokenizerFast"), std::string::npos);
}

TEST_F(Folder, ProcessorsMayHoldATokenizersFiles) {
  index["processor"] = {"transformers", "Qwen2VLProcessor"};
  index["tokenizer"] = {"transformers", "T5Tokenizer"};
  for (const char* part : {"tokenizer", "processor"})
    std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/data/t5/whole", t / part);
  write("processor/preprocessor_config.json", R"({"merge_size": 2})");
  const ModelFolder m = open();
  EXPECT_EQ(m.files().at("processor/preprocessor_config.json"), R"({"merge_size": 2})");
  EXPECT_EQ(m.files().at("processor/tokenizer.json"), read_file(t / "processor/tokenizer.json"));
  EXPECT_EQ(m.tokenizer("tokenizer")->size(), 180);
}

TEST_F(Folder, OfOtherPipelinesOfDiffusersOpensWhereItsPartsAreKnownElseItSaysWhatItLacks) {
  const std::string sd = t / "sd", control = MD_SOURCE_DIR "/tests/golden/pipelines/controlnet";
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/pipelines/sd", sd, std::filesystem::copy_options::recursive);
  const json plain = parse_json(read_file(sd + "/model_index.json"));
  const auto opened = [&](json whole) {
    write_file_atomic(sd + "/model_index.json", whole.dump());
    try {
      return fmt::format("{}", fmt::join(make_family(ModelFolder::open(sd))->spec().controlnets, ", "));
    } catch (const Error& e) {
      return std::string(e.what());
    }
  };
  json whole = plain;
  for (const char* name :
       {"StableDiffusionPAGPipeline", "StableDiffusionPAGInpaintPipeline", "LatentConsistencyModelImg2ImgPipeline"}) {
    whole["_class_name"] = name;
    EXPECT_EQ(opened(whole), "") << name;
  }
  std::filesystem::copy(control, sd + "/controlnet");
  whole["controlnet"] = {"diffusers", "ControlNetModel"};
  for (const char* name : {"StableDiffusionControlNetImg2ImgPipeline", "StableDiffusionControlNetInpaintPipeline",
                           "StableDiffusionControlNetPAGPipeline"}) {
    whole["_class_name"] = name;
    EXPECT_EQ(opened(whole), "controlnet") << name;
  }
  std::filesystem::copy(control, sd + "/controlnet_1");
  whole["controlnet"] = {"diffusers", "MultiControlNetModel"};
  EXPECT_EQ(opened(whole), "controlnet, controlnet_1");
  whole["controlnet"] = {"diffusers", "ControlNetUnionModel"};
  EXPECT_EQ(opened(whole), sd + "/model_index.json: controlnet is a ControlNetUnionModel: ControlNets of several kinds "
                                "of control images (union) are not supported");
  whole = plain;
  whole["_class_name"] = "StableDiffusionInstructPix2PixPipeline";
  EXPECT_EQ(opened(whole),
            sd + "/model_index.json: _class_name is 'StableDiffusionInstructPix2PixPipeline': a UNet that "
                 "takes the image to edit in addition to the latents, which is not supported");
}

TEST_F(Folder, ImageProcessorsConfigIsAmongTheFiles) {
  index["image_processor"] = {"transformers", "CLIPImageProcessor"};
  index["feature_extractor"] = {"transformers", "CLIPImageProcessor"};  // used only by a safety checker: not opened
  EXPECT_NE(refusal().find("image_processor/preprocessor_config.json"), std::string::npos) << refusal();
  write("image_processor/preprocessor_config.json", R"({"crop_size": 3})");
  EXPECT_EQ(open().files().at("image_processor/preprocessor_config.json"), R"({"crop_size": 3})");
}

TEST_F(Folder, ClassesInConfigsMustBeThoseOfTheIndex) {
  EXPECT_EQ(refusal(), "opened");
  write("scheduler/scheduler_config.json", R"({"_class_name": "FlaxDDIMScheduler"})");
  EXPECT_EQ(refusal(), "opened");
  write("scheduler/scheduler_config.json", R"({"_class_name": "AutoencoderKL"})");
  EXPECT_NE(
      refusal().find("scheduler/scheduler_config.json: _class_name is \"AutoencoderKL\", but model_index.json says "
                     "DDIMScheduler; expected one of: DDIMScheduler"),
      std::string::npos)
      << refusal();
  write("scheduler/scheduler_config.json", "[]");
  EXPECT_NE(refusal().find("scheduler_config.json: expected a JSON object, found array"), std::string::npos);
  write("scheduler/scheduler_config.json", "{}");
  index["vae"] = {"diffusers", "AutoencoderKL"};
  json vae = parse_json(read_file(MD_SOURCE_DIR "/configs/models/emoji/vae/config.json"));
  write("vae/config.json", vae.dump());
  EXPECT_EQ(refusal(), "opened");
  vae["_class_name"] = "AutoencoderKLWan";
  write("vae/config.json", vae.dump());
  EXPECT_NE(
      refusal().find("vae/config.json: _class_name is \"AutoencoderKLWan\", but model_index.json says AutoencoderKL"),
      std::string::npos)
      << refusal();
}

TEST_F(Folder, DamagedIndexesAreRefused) {
  make_folders(t / "vae");
  const std::vector<std::pair<json, std::string>> cases = {
      {{{"vae", nullptr}}, "vae is null; expected [library, class], since there is a folder of that name"},
      {{{"vae", "AutoencoderKL"}}, "vae is \"AutoencoderKL\"; expected [library, class]"},
      {{{"vae", {"diffusers"}}}, "vae is [\"diffusers\"]; expected [library, class]"},
      {{{"vae", {"diffusers", nullptr}}}, "vae is [\"diffusers\",null]; expected [library, class]"},
      {{{"vae", {3, "AutoencoderKL"}}}, "vae is [3,\"AutoencoderKL\"]; expected [library, class]"},
      {{{"vae", {"diffusers", "AutoencoderKI"}}},
       "the class of vae is 'AutoencoderKI'; expected one of: AutoencoderKL, UNet2DConditionModel"},
      {{{"unet", {{"a", 1}}}}, "unet is {\"a\":1}; expected [library, class]"},
      {{{"../vae", {"diffusers", "AutoencoderKL"}}}, "'../vae' is not the name of a folder inside"},
      {{{"_diffusers_version", 3}}, "_diffusers_version is 3; expected a text"},
      {{{"_class_name", nullptr}}, "_class_name is null"},
      {{{"scheduler", {nullptr, nullptr}}}, "there is no scheduler"}};
  const json whole = index;
  for (const auto& [change, message] : cases) {
    index = whole;
    index.update(change);
    EXPECT_NE(refusal().find(message), std::string::npos) << message << "\n" << refusal();
  }
  index = whole;
  index.update({{"requires_safety_checker", true}, {"boundary_ratio", 0.9}, {"safety_checker", {nullptr, nullptr}}});
  EXPECT_EQ(refusal(), "opened");
  write("model_index.json", "");
  EXPECT_THROW(ModelFolder::open(t.path()), Error);
}

TEST(ModelFolderWithoutIndex, IsRefusedWithWhatToTry) {
  const TemporaryFolder empty;
  try {
    ModelFolder::open(empty.path());
    ADD_FAILURE() << "opened";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    const std::string message = e.what();
    EXPECT_NE(message.find("'" + empty.path() + "' is a folder without model_index.json; expected a model folder"),
              message.npos)
        << message;
    EXPECT_NE(message.find("try: ls " + empty.path()), message.npos) << message;
  }
}

TEST(ModelFolder, ATokenizerWithoutAFolderIsSavedWithTheLengthOfItsTextEncoder) {
  const ModelFolder emoji = ModelFolder::open(MD_SOURCE_DIR "/configs/models/emoji");
  for (const std::string part : {"", "_2"}) {
    const json encoder = parse_json(emoji.files().at("text_encoder" + part + "/config.json")),
               tokenizer = parse_json(emoji.tokenizer_files().at("tokenizer" + part + "/tokenizer_config.json"));
    EXPECT_EQ(encoder.at("max_position_embeddings"), 32);
    EXPECT_EQ(tokenizer.at("model_max_length"), 32);
  }
}

// P-19
TEST_F(Folder, SizesThatNoModelHasAreRefusedBeforeAnythingIsBuilt) {
  index["unet"] = {"diffusers", "UNet2DConditionModel"};
  const json unet = parse_json(read_file(MD_SOURCE_DIR "/configs/models/emoji/unet/config.json"));
  for (const auto& [change, message] : std::vector<std::pair<json, std::string>>{
           {{{"layers_per_block", 100000}}, "'layers_per_block' is 100000; no model has more than 1000"},
           {{{"layers_per_block", 2147483648}}, "no model has more than 1000"},
           {{{"transformer_layers_per_block", {1, 1, 18446744073709551615u}}}, "no model has more than 1000"},
           {{{"in_channels", 2147483648}}, "'in_channels' is 2147483648; no model has more than 16777216"}}) {
    json config = unet;
    config.update(change);
    write("unet/config.json", config.dump());
    EXPECT_NE(refusal().find(message), std::string::npos) << refusal();
  }
  json config = unet;
  config["block_out_channels"][0] = 2147483648;
  write("unet/config.json", config.dump());
  EXPECT_NE(refusal().find("'block_out_channels' is 2147483648; no model has more than 16777216"), std::string::npos)
      << refusal();
}

}  // namespace
}  // namespace md
