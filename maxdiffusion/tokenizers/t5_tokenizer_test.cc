#include "maxdiffusion/tokenizers/t5_tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

const std::string kFolders = MD_SOURCE_DIR "/tests/golden/data/t5/";
const char* const kNames[] = {"spiece", "whole", "flags"};

// Recorded from transformers' T5Tokenizer; ids must be equal.
const json& golden() {
  static const json all = parse_json(read_file(kFolders + "texts.json"));
  return all;
}
T5Tokenizer open(const std::string& name) { return T5Tokenizer::from_folder(kFolders + name); }
void expect_golden(const Tokenizer& t, const std::string& name) {
  ASSERT_GT(golden()["rows"].size(), 300u);
  EXPECT_EQ(t.size(), golden()["sizes"][name].get<int64_t>());
  for (const json& row : golden()["rows"])
    EXPECT_EQ(t.tokens(row["text"].get<std::string>(), golden()["length"]), row[name].get<Ids>()) << row["text"];
}
std::string error_of(const std::string& folder) {
  try {
    T5Tokenizer::from_folder(folder);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
  return "no error";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(T5Tokenizer, GivesTheIdsOfTransformers) {
  for (const char* name : kNames) expect_golden(open(name), name);
}

TEST(T5Tokenizer, EndsTextsAndPadsThem) {
  const T5Tokenizer t = open("spiece");
  EXPECT_EQ(t.end_id(), 1);
  EXPECT_EQ(t.pad_id(), 0);
  bool cut = true;
  const Ids whole = t.tokens("hello world", 8, &cut);
  EXPECT_EQ(whole, (Ids{48, 74, 1}));
  EXPECT_FALSE(cut);
  EXPECT_EQ(t.encode("hello world", 5), (Ids{48, 74, 1, 0, 0}));
  EXPECT_EQ(t.encode("hello world", 2, &cut), (Ids{48, 1}));
  EXPECT_TRUE(cut);
  EXPECT_EQ(t.encode("hello world", 1, &cut), Ids{1});
  EXPECT_THROW(t.encode("hello world", 0), Error);
  EXPECT_EQ(t.encode(std::string(200'000, 'q'), 6, &cut).size(), 6u);
}

TEST(T5Tokenizer, BytesThatAreNotTextAreUnknown) {
  const T5Tokenizer t = open("spiece");
  EXPECT_EQ(t.tokens("a\xff"
                     "b",
                     9),
            t.tokens("a\xef\xbf\xbd"
                     "b",
                     9));
  EXPECT_NO_THROW(t.tokens("\xe2\x82", 9));
  EXPECT_NO_THROW(t.tokens(std::string(5000, '\xc3'), 9));
}

TEST(T5Tokenizer, SavedFolderIsTheOneThatWasRead) {
  for (const char* name : kNames) {
    const TemporaryFolder folder;
    const T5Tokenizer t = open(name);
    t.save(folder.path());
    expect_golden(T5Tokenizer::from_folder(folder.path()), name);
    for (const auto& [file, bytes] : t.files()) EXPECT_EQ(bytes, read_file(kFolders + name + "/" + file));
  }
}

TEST(T5Tokenizer, ThreadsMayShareIt) {
  const T5Tokenizer t = open("spiece");
  std::vector<std::jthread> threads;
  for (int k = 0; k < 4; ++k) threads.emplace_back([&] { expect_golden(t, "spiece"); });
}

TEST(T5Tokenizer, IsOpenedByItsClass) {
  expect_golden(*open_tokenizer("T5Tokenizer", kFolders + "whole"), "whole");
  expect_golden(*open_tokenizer("T5TokenizerFast", kFolders + "whole"), "whole");
  try {
    open_tokenizer("LlamaTokenizer", kFolders + "whole");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_TRUE(has(e.what(), "'LlamaTokenizer' is not one of: CLIPTokenizer, CLIPTokenizerFast, T5Tokenizer"))
        << e.what();
  }
}

// P-20
TEST(T5Tokenizer, ASentencePieceModelThatContradictsTokenizerJsonIsNamed) {
  const TemporaryFolder folder;
  auto message = [&] {
    testing::internal::CaptureStderr();
    expect_golden(*open_tokenizer("T5Tokenizer", folder.path()), "whole");
    return testing::internal::GetCapturedStderr();
  };
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"})
    write_file_atomic(folder / file, read_file(kFolders + "whole/" + file));
  const json vocab = parse_json(read_file(folder / "tokenizer.json"))["model"]["vocab"];
  std::vector<std::pair<std::string, float>> pieces;
  for (size_t i = 0; i < 60; ++i) pieces.emplace_back(i < 3 ? "special" : vocab[i][0].get<std::string>(), vocab[i][1]);
  const auto write = [&] {
    std::string model;  // protobuf messages of under 128 bytes: text is field 1, score field 2
    for (const auto& [text, score] : pieces) {
      std::string piece = "\x0a" + std::string(1, static_cast<char>(text.size())) + text + "\x15";
      piece.append(reinterpret_cast<const char*>(&score), sizeof score);
      model += "\x0a" + std::string(1, static_cast<char>(piece.size())) + piece;
    }
    write_file_atomic(folder / "spiece.model", model);
  };
  write();
  EXPECT_EQ(message(), "");
  pieces[48].first = "▁jello";
  write();
  std::string text = message();
  EXPECT_TRUE(has(text, "'▁jello' (")) << text;
  EXPECT_TRUE(has(text, "in spiece.model; tokenizer.json is read, spiece.model is not")) << text;
  pieces[48].first = "▁hello";
  pieces[50].second = -1;
  write();
  EXPECT_TRUE(has(text = message(), "(-1) in spiece.model")) << text;
  write_file_atomic(folder / "spiece.model", "damaged");
  EXPECT_TRUE(has(text = message(), "spiece.model: not a SentencePiece model")) << text;
}

TEST(T5Tokenizer, BadFilesAreNamed) {
  const TemporaryFolder folder;
  const std::string whole = folder / "tokenizer.json", model = folder / "spiece.model",
                    config = folder / "tokenizer_config.json";
  EXPECT_TRUE(has(error_of(folder.path()), "no tokenizer.json and no spiece.model"));
  write_file_atomic(model, "not a model");
  EXPECT_TRUE(has(error_of(folder.path()), model + ": not a SentencePiece model"));
  const std::string good = read_file(kFolders + "spiece/spiece.model");
  write_file_atomic(model, good.substr(0, good.size() / 2));
  EXPECT_TRUE(has(error_of(folder.path()), model));
  write_file_atomic(model, good);
  EXPECT_EQ(error_of(folder.path()), "no error");
  write_file_atomic(config, R"({"padding_side": "left"})");
  EXPECT_TRUE(has(error_of(folder.path()), config));
  write_file_atomic(config, "{");
  EXPECT_TRUE(has(error_of(folder.path()), config + ": not a JSON object"));
  std::filesystem::remove(config);
  write_file_atomic(whole, R"({"model": {"type": "BPE", "vocab": {}}})");
  EXPECT_TRUE(has(error_of(folder.path()), whole + ": 'model' is not a Unigram"));
  write_file_atomic(whole, R"({"model": {"type": "Unigram", "vocab": [["a", 0], ["b"]]}})");
  EXPECT_TRUE(has(error_of(folder.path()), "token 1 is [\"b\"]"));
  write_file_atomic(whole, R"({"model": {"type": "Unigram", "vocab": [["a", 0]]}})");
  EXPECT_TRUE(has(error_of(folder.path()), "1 tokens"));
  write_file_atomic(whole, R"({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fw=="},
                               "model": {"type": "Unigram", "vocab": [["a", 0], ["b", 0], ["c", 0]]}})");
  EXPECT_TRUE(has(error_of(folder.path()), "table of text normalization is damaged")) << error_of(folder.path());
}

}  // namespace
}  // namespace md
