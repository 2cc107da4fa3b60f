// What of a model folder is opened beside its models: tokenizers by their class, the image processor.
#include "maxdiffusion/families/model_folder.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

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
  EXPECT_EQ(m.tokenizer("tokenizer").tokens("hello world", 9), (std::vector<int32_t>{48, 74, 1}));
  EXPECT_EQ(m.tokenizer("tokenizer_2").end_id(), 49407);  // there is no folder: the published vocabulary
  const auto files = m.tokenizer_files();
  for (const char* file : {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"})
    EXPECT_EQ(files.at(file), read_file(t / file));
  EXPECT_TRUE(files.contains("tokenizer_2/vocab.json"));
}

TEST_F(Folder, TokenizersOfNoClassOfOursAreThoseThatTheirOwnConfigNames) {
  std::filesystem::copy(MD_SOURCE_DIR "/tests/golden/data/t5/whole", t / "tokenizer");
  index["tokenizer"] = {"transformers", "TokenizersBackend"};
  EXPECT_EQ(open().tokenizer("tokenizer").size(), 180);
  write("tokenizer/tokenizer_config.json", R"({"tokenizer_class": "TokenizersBackend"})");
  EXPECT_NE(refusal().find("the class 'TokenizersBackend' of tokenizer is not one of: UNet2DConditionModel"),
            std::string::npos);
  EXPECT_NE(refusal().find("CLIPTokenizer, CLIPTokenizerFast, T5Tokenizer, T5TokenizerFast"), std::string::npos);
}

TEST_F(Folder, ImageProcessorsConfigIsAmongTheFiles) {
  index["image_processor"] = {"transformers", "CLIPImageProcessor"};
  index["feature_extractor"] = {"transformers", "CLIPImageProcessor"};  // a safety checker's: not opened
  EXPECT_NE(refusal().find("image_processor/preprocessor_config.json"), std::string::npos) << refusal();
  write("image_processor/preprocessor_config.json", R"({"crop_size": 3})");
  EXPECT_EQ(open().files().at("image_processor/preprocessor_config.json"), R"({"crop_size": 3})");
}

}  // namespace
}  // namespace md
