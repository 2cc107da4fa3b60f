#include "maxdiffusion/tokenizers/clip_tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/tokenizers/clip_words.h"

namespace md {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using Ids = std::vector<int32_t>;

const std::string kBpe = MD_DEPS_DIR "/open_clip/bpe_simple_vocab_16e6.txt.gz";

const ClipTokenizer& clip() {
  static const ClipTokenizer t = ClipTokenizer::from_bpe(kBpe);
  return t;
}

// Recorded from transformers' CLIPTokenizer; ids must be equal. The file omits trailing padding.
const json& golden() {
  static const json rows = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/tokenizer.json"))["rows"];
  return rows;
}
void expect_golden(const ClipTokenizer& t, const char* key) {
  ASSERT_GT(golden().size(), 300u);
  for (const json& row : golden()) {
    Ids expected = row[key];
    expected.resize(77, t.pad_id());
    EXPECT_EQ(t.encode(row["text"].get<std::string>(), 77), expected) << row["text"];
  }
}
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
  return "no error";
}
// Deleted at program exit.
const TemporaryFolder& root() {
  static const TemporaryFolder folder;
  return folder;
}
std::string fresh_folder(const std::string& name) {
  std::string folder = root() / name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

TEST(ClipTokenizer, GivesTheIdsOfTransformers) {
  EXPECT_EQ(clip().size(), 49408);
  EXPECT_EQ(clip().end_id(), 49407);
  expect_golden(clip(), "ids");
}

TEST(ClipTokenizer, PaddingTokenIsFoundInTextsToo) {
  // SDXL's second tokenizer pads with "!", so every "!" in a text becomes the pad token.
  ClipTokenizer t = ClipTokenizer::from_bpe(kBpe);
  t.set_pad_id(0);
  expect_golden(t, "ids_pad_0");
  t.set_pad_id(t.end_id());
  expect_golden(t, "ids");
}

TEST(ClipTokenizer, SavedFolderReadsBackTheSame) {
  const std::string folder = fresh_folder("tokenizer"), second = fresh_folder("tokenizer_2");
  clip().save(folder);
  ClipTokenizer back = ClipTokenizer::from_folder(folder);
  EXPECT_EQ(back.size(), 49408);
  expect_golden(back, "ids");
  back.set_pad_id(0);
  back.save(second);
  const ClipTokenizer with_pad = ClipTokenizer::from_folder(second);
  EXPECT_EQ(with_pad.pad_id(), 0);
  expect_golden(with_pad, "ids_pad_0");
  EXPECT_EQ(read_file(folder + "/vocab.json"), read_file(second + "/vocab.json"));
  const auto max_length = [](const std::string& in) {
    return parse_json(read_file(in + "/tokenizer_config.json")).at("model_max_length");
  };
  EXPECT_EQ(max_length(folder), 77);
  back.set_max_length(248);
  back.save(second);
  ClipTokenizer::from_folder(second).save(folder);
  EXPECT_EQ(max_length(folder), 248);
}

TEST(ClipTokenizer, AddedTokensOfAFolderAreRead) {
  const std::string folder = fresh_folder("tokenizer_added"), again = fresh_folder("tokenizer_added_2");
  clip().save(folder);
  json config = parse_json(read_file(folder + "/tokenizer_config.json"));
  config["added_tokens_decoder"]["49408"] = {{"content", "<my-cat>"}, {"normalized", false}, {"special", false}};
  config["bos_token"] = {{"__type", "AddedToken"}, {"content", "<|startoftext|>"}, {"normalized", true}};
  write_file_atomic(folder + "/tokenizer_config.json", config.dump());
  const ClipTokenizer t = ClipTokenizer::from_folder(folder);
  EXPECT_EQ(t.size(), 49409);
  EXPECT_EQ(t.encode("a<my-cat>a", 6), (Ids{49406, 320, 49408, 320, 49407, 49407}));
  EXPECT_EQ(t.encode("<|StartOfText|>|x", 6), (Ids{49406, 49406, 347, 343, 49407, 49407}));  // as in transformers
  t.save(again);
  EXPECT_EQ(ClipTokenizer::from_folder(again).encode("a<my-cat>a", 6), t.encode("a<my-cat>a", 6));
}

TEST(ClipTokenizer, TruncationKeepsTheEndAndIsReported) {
  bool cut = false;
  EXPECT_EQ(clip().encode("a a a", 5, &cut), (Ids{49406, 320, 320, 320, 49407}));
  EXPECT_FALSE(cut);
  EXPECT_EQ(clip().encode("a a a a", 5, &cut), (Ids{49406, 320, 320, 320, 49407}));
  EXPECT_TRUE(cut);
  EXPECT_THROW(clip().encode("a", 1), Error);
}

TEST(ClipTokenizer, ATextOfMegabytesTakesNoLongerThanItsBeginning) {
  const auto start = std::chrono::steady_clock::now();
  bool cut = false;
  EXPECT_EQ(clip().encode(std::string(10 << 20, 'x'), 77, &cut), clip().encode(std::string(60'000, 'x'), 77));
  EXPECT_TRUE(cut);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
  EXPECT_EQ(clip().encode(std::string(1 << 18, ' ') + "a red heart", 77, &cut), clip().encode("a red heart", 77));
  EXPECT_FALSE(cut);
}

TEST(ClipTokenizer, BytesThatAreNotTextDoNoHarm) {
  EXPECT_EQ(clip().tokens("a\xff"
                          "b",
                          77),
            clip().tokens("a\xef\xbf\xbd"
                          "b",
                          77));
  EXPECT_NO_THROW(clip().tokens("\xe2\x82", 77));
  EXPECT_NO_THROW(clip().tokens(std::string(5000, '\xc3'), 77));
}

TEST(ClipTokenizer, ThreadsMayShareIt) {
  const ClipTokenizer t = ClipTokenizer::from_bpe(kBpe);
  std::vector<std::jthread> threads;
  for (int k = 0; k < 4; ++k) threads.emplace_back([&] { expect_golden(t, "ids"); });
}

TEST(ClipTokenizer, SmallVocabularyFallsBackToTheUnknownToken) {
  const std::string folder = fresh_folder("tokenizer_small");
  std::ofstream(folder + "/vocab.json")
      << R"({"l":0,"o":1,"o</w>":2,"lo</w>":3,"<|startoftext|>":4,"<|endoftext|>":5,"<unk>":6})";
  std::ofstream(folder + "/merges.txt") << "#version: 0.2\nl o</w>\n";
  std::ofstream(folder + "/special_tokens_map.json") << R"({"unk_token":{"content":"<unk>","normalized":true}})";
  EXPECT_EQ(ClipTokenizer::from_folder(folder).encode("lo lx", 7), (Ids{4, 3, 0, 6, 5, 5, 5}));
}

// P-20
TEST(ClipTokenizer, ContradictingTokenizerJsonIsReported) {
  const std::string folder = fresh_folder("tokenizer_both");
  const json vocab = parse_json(R"({"l":0,"o":1,"o</w>":2,"lo":3,"lo</w>":4,"<|startoftext|>":5,"<|endoftext|>":6})");
  std::ofstream(folder + "/vocab.json") << vocab.dump();
  std::ofstream(folder + "/merges.txt") << "#version: 0.2\nl o</w>\nl o\n";
  auto message = [&](const json& whole) {
    std::ofstream(folder + "/tokenizer.json") << whole.dump();
    testing::internal::CaptureStderr();
    EXPECT_EQ(ClipTokenizer::from_folder(folder).encode("lo", 4), (Ids{5, 4, 6, 6}));
    return testing::internal::GetCapturedStderr();
  };
  const json same = {{"model",
                      {{"type", "BPE"},
                       {"end_of_word_suffix", "</w>"},
                       {"vocab", vocab},
                       {"merges", json::array({json::array({"l", "o</w>"}), "l o"})}}},
                     {"added_tokens", {{{"content", "<|endoftext|>"}, {"id", 6}}}}};
  EXPECT_EQ(message(same), "");
  json other = same;
  other["model"]["vocab"]["lo"] = 7;
  const std::string read = "; vocab.json and merges.txt are read, tokenizer.json is not";
  EXPECT_NE(message(other).find("'lo' is 7 in tokenizer.json and 3 in the other files" + read), std::string::npos);
  other = same;
  other["model"]["merges"] = {"l o", "l o</w>"};
  EXPECT_NE(message(other).find("merge 0 is 'l o' in tokenizer.json and 'l o</w>' in merges.txt" + read),
            std::string::npos);
  other["model"]["merges"] = {"l o</w>"};
  EXPECT_NE(message(other).find("merge 1 is '' in tokenizer.json and 'l o' in merges.txt" + read), std::string::npos);
  other = same;
  other["added_tokens"].push_back({{"content", "<my-cat>"}, {"id", 7}});
  EXPECT_NE(message(other).find("'<my-cat>' is 7 in tokenizer.json and -1 in the other files"), std::string::npos);
  other = same;
  other["model"]["vocab"].erase("lo");
  EXPECT_NE(message(other).find("'lo', which is 3, is not in tokenizer.json"), std::string::npos);
  other["model"]["type"] = "Unigram";
  EXPECT_NE(message(other).find("not the byte-pair model of CLIP"), std::string::npos);
}

// P-20
TEST(ClipTokenizer, AListOfMergesThatIsCutIsNamed) {
  const std::string folder = fresh_folder("tokenizer_cut");
  for (const auto& [name, text] : clip().files()) std::ofstream(folder + "/" + name) << text;
  EXPECT_EQ(ClipTokenizer::from_folder(folder).encode("a red lollipop", 9), clip().encode("a red lollipop", 9));
  const std::string merges = read_file(folder + "/merges.txt");
  for (size_t part : {2, 3}) {  // after a line, and inside one
    const size_t end = part == 2 ? merges.find('\n', merges.size() / 2) + 1 : merges.rfind('\n', merges.size() - 2);
    std::ofstream(folder + "/merges.txt") << merges.substr(0, end);
    const std::string e = error_of([&] { ClipTokenizer::from_folder(folder); });
    EXPECT_NE(e.find("merges.txt': "), std::string::npos) << e;
    EXPECT_NE(e.find(" of 49408 tokens of the vocabulary unreachable, such as '"), std::string::npos) << e;
  }
}

TEST(ClipTokenizer, BadFilesAreNamed) {
  EXPECT_NE(error_of([] { ClipTokenizer::from_bpe("/nowhere/bpe.txt.gz"); }).find("/nowhere/bpe.txt.gz"),
            std::string::npos);
  const std::string folder = fresh_folder("tokenizer_bad");
  EXPECT_NE(error_of([&] { ClipTokenizer::from_folder(folder); }).find("no vocab.json"), std::string::npos);
  std::ofstream(folder + "/vocab.json") << R"({"l":0,"o</w>":1,"lo</w>":2})";
  EXPECT_NE(error_of([&] { ClipTokenizer::from_folder(folder); }).find("no merges.txt"), std::string::npos);
  std::ofstream(folder + "/merges.txt") << "#version: 0.2\nl o</w>\nl x\n";
  EXPECT_NE(error_of([&] { ClipTokenizer::from_folder(folder); }).find("merges.txt:3: 'x' is not in the vocabulary"),
            std::string::npos);
  std::ofstream(folder + "/vocab.json") << "{\"l\":0,";
  EXPECT_NE(error_of([&] { ClipTokenizer::from_folder(folder); }).find("vocab.json"), std::string::npos);
  const std::string cut = folder + "/cut.gz";
  std::ofstream(cut, std::ios::binary) << read_file(kBpe).substr(0, 5000);
  EXPECT_NE(error_of([&] { ClipTokenizer::from_bpe(cut); }).find(cut), std::string::npos);
}

TEST(ClipWords, MatchTheRegularExpression) {
  const auto words = [](std::string_view text) {
    std::vector<std::string> out;
    split_clip_words(normalize_clip_text(text), [&](std::string_view w) { out.emplace_back(w); });
    return out;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(words("It's  12 o'clock!?"), (Words{"it", "'s", "1", "2", "o", "'", "clock", "!?"}));
  EXPECT_EQ(words("''s"), (Words{"''", "s"}));
  EXPECT_EQ(words("<|endoftext|>>"), (Words{"<|", "endoftext", "|>", ">"}));
  EXPECT_EQ(words("!<|endoftext|>>"), (Words{"!<|", "endoftext", "|>>"}));
  EXPECT_EQ(words("İΣ"), (Words{"i", "\u0307", "σ"}));
  EXPECT_EQ(words(" \n\u3000"), Words{});
}

}  // namespace
}  // namespace md
