#include "maxdiffusion/tokenizers/json_tokenizer.h"

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

const std::string kFolders = MD_SOURCE_DIR "/tests/golden/data/tokenizers/";
const std::string kText = "It's 3 cats, naïve 猫 <|im_end|>\n";

// Recorded from transformers by tools/golden/json_tokenizers.py; ids must be equal.
const json& golden() {
  static const json all = parse_json(read_file(kFolders + "lines.json"));
  return all;
}

/// The lines of the recording script: fragments of its pools, chosen by the same random number generator.
class Lines {
 public:
  Lines() {
    for (const json& pool : golden()["pools"]) {
      pools_.emplace_back();
      for (const json& e : pool) {
        std::string text = e.is_string() ? e.get<std::string>() : "";
        if (e.is_array())
          for (const json& b : e) text += static_cast<char>(b.get<int>());
        pools_.back().push_back(text);
      }
    }
  }
  std::string next() {
    std::string line;
    for (uint64_t n = 1 + number(24); n > 0; --n) {
      const std::vector<std::string>& pool = pools_[number(pools_.size())];
      line += pool[number(pool.size())];
    }
    return line;
  }

 private:
  uint64_t number(uint64_t below) {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return (state_ >> 33) % below;
  }
  std::vector<std::vector<std::string>> pools_;
  uint64_t state_ = 1;
};

uint64_t add_to_hash(uint64_t hash, uint32_t value) {
  for (int i = 0; i < 4; ++i) hash = (hash ^ (value >> (8 * i) & 0xFF)) * 0x100000001B3ULL;
  return hash;
}

std::string hash_of_lines(const Tokenizer& t, int64_t count) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  Lines lines;
  for (int64_t i = 0; i < count; ++i) {
    const Ids ids = t.tokens(lines.next(), golden()["length"]);
    for (const int32_t id : ids) hash = add_to_hash(hash, static_cast<uint32_t>(id));
    hash = add_to_hash(hash, static_cast<uint32_t>(ids.size()));
  }
  return fmt::format("{:016x}", hash);
}

std::shared_ptr<const Tokenizer> open(const std::string& name) {
  return open_tokenizer(name == "qwen" ? "Qwen2Tokenizer" : "PreTrainedTokenizerFast", kFolders + name);
}

void expect_golden(const std::string& name) {
  const std::shared_ptr<const Tokenizer> t = open(name);
  EXPECT_EQ(t->size(), golden()["sizes"][name].get<int64_t>());
  Lines lines;
  for (const json& ids : golden()["samples"][name]) {
    const std::string line = lines.next();
    ASSERT_EQ(t->tokens(line, golden()["length"]), ids.get<Ids>())
        << json(line).dump(-1, ' ', true, json::error_handler_t::replace);
  }
  EXPECT_EQ(hash_of_lines(*t, golden()["counts"][name]), golden()["hashes"][name].get<std::string>());
}

TEST(JsonTokenizer, GivesTheIdsOfQwen2Tokenizer) { expect_golden("qwen"); }
TEST(JsonTokenizer, GivesTheIdsOfGpt2sWordsAndATemplate) { expect_golden("gpt2"); }
TEST(JsonTokenizer, GivesTheIdsOfByteFallback) { expect_golden("llama"); }
TEST(JsonTokenizer, GivesTheIdsOfSuffixesAndUnknownTokens) { expect_golden("words"); }
TEST(JsonTokenizer, GivesTheIdsOfAUnigramModel) { expect_golden("unigram"); }

TEST(JsonTokenizer, VocabularyAndMergesAreTheSameTokenizer) {
  const TemporaryFolder folder;
  for (const char* name : {"vocab.json", "merges.txt"}) std::filesystem::copy(kFolders + "qwen/" + name, folder / name);
  // The format of transformers 4, with the added tokens.
  json config = parse_json(read_file(kFolders + "qwen/tokenizer_config.json"));
  const json whole = parse_json(read_file(kFolders + "qwen/tokenizer.json"));
  for (const json& token : whole["added_tokens"]) config["added_tokens_decoder"][token["id"].dump()] = token;
  write_file_atomic(folder / "tokenizer_config.json", config.dump());
  const auto two = open_tokenizer("Qwen2Tokenizer", folder.path()), one = open("qwen");
  Lines lines;
  for (int i = 0; i < 300; ++i) {
    const std::string line = lines.next();
    ASSERT_EQ(two->tokens(line, 128), one->tokens(line, 128)) << line;
  }
  EXPECT_THROW(open_tokenizer("PreTrainedTokenizerFast", folder.path()), Error);
}

TEST(JsonTokenizer, CutsATextBeforeItsEndTokens) {
  const auto t = open("gpt2");  // <s> text </s> </s>
  bool cut = true;
  EXPECT_EQ(t->tokens("", 8, &cut), (Ids{0, 1, 1}));
  EXPECT_FALSE(cut);
  const Ids whole = t->tokens(kText, 99);
  const Ids shorter = t->tokens(kText, 7, &cut);
  EXPECT_TRUE(cut);
  EXPECT_EQ(shorter, (Ids{0, whole[1], whole[2], whole[3], whole[4], 1, 1}));
  EXPECT_EQ(t->encode("", 5), (Ids{0, 1, 1, 1, 1}));  // padded with </s>
  EXPECT_THROW(t->tokens(kText, 2), Error);
  EXPECT_EQ(t->end_id(), 1);
}

TEST(JsonTokenizer, SavedFolderIsTheOneThatWasRead) {
  for (const char* name : {"qwen", "llama"}) {
    const TemporaryFolder folder;
    open(name)->save(folder.path());
    for (const auto& f : std::filesystem::directory_iterator(kFolders + name))
      EXPECT_EQ(read_file(folder / f.path().filename().string()), read_file(f.path().string()));
  }
}

TEST(JsonTokenizer, AWordOfMegabytesIsEncodedInNLogN) {
  const auto t = open("qwen");
  bool cut = false;
  EXPECT_EQ(t->tokens(std::string(2'000'000, 'q'), 64, &cut).size(), 64u);
  EXPECT_TRUE(cut);
}

TEST(JsonTokenizer, ThreadsGetTheSameIds) {
  const auto t = open("qwen");
  const Ids want = t->tokens(kText, 64);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int n = 0; n < 50; ++n) EXPECT_EQ(t->tokens(kText, 64), want);
    });
}

/// The error for qwen's tokenizer.json after `change` has edited it.
std::string error_of(const std::function<void(json&)>& change) {
  const TemporaryFolder folder;
  json j = parse_json(read_file(kFolders + "qwen/tokenizer.json"));
  change(j);
  write_file_atomic(folder / "tokenizer.json", j.dump());
  try {
    JsonTokenizer::from_folder(folder.path());
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_NE(e.message().find("tokenizer.json"), std::string::npos) << e.message();
    return e.message();
  }
  return "no error";
}

TEST(JsonTokenizer, WhatItDoesNotKnowIsNamed) {
  const auto expect = [](const std::string& part, const std::function<void(json&)>& change) {
    const std::string message = error_of(change);
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect("the normalizer 'Nmt' is not one of", [](json& j) { j["normalizer"] = {{"type", "Nmt"}}; });
  expect("the pre-tokenizer 'Sometimes'", [](json& j) { j["pre_tokenizer"] = {{"type", "Sometimes"}}; });
  expect("the post-processor 'Late'", [](json& j) { j["post_processor"] = {{"type", "Late"}}; });
  expect("the model 'WordPiece'", [](json& j) { j["model"]["type"] = "WordPiece"; });
  expect("regular expression '(['", [](json& j) {
    j["pre_tokenizer"] = {{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(["}}}};
  });
  expect("behavior 'Halved'", [](json& j) {
    j["pre_tokenizer"] = {{"type", "Split"}, {"behavior", "Halved"}, {"pattern", {{"String", "x"}}}};
  });
  expect("merge 0 ('Q' 'zz'): 'zz' is not in the vocabulary", [](json& j) { j["model"]["merges"][0] = {"Q", "zz"}; });
  expect("the id of 'a' is -1", [](json& j) { j["model"]["vocab"]["a"] = -1; });
  expect("has no id", [](json& j) { j["added_tokens"][0].erase("id"); });
  expect("single word", [](json& j) { j["added_tokens"][0]["single_word"] = true; });
  expect("names '<x>'", [](json& j) {
    j["post_processor"] = {{"type", "TemplateProcessing"},
                           {"single", {{{"SpecialToken", {{"id", "<x>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                           {"special_tokens", json::object()}};
  });
}

}  // namespace
}  // namespace md
