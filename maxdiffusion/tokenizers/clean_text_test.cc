#include "maxdiffusion/tokenizers/clean_text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"

namespace md {
namespace {

using nlohmann::json;

// Recorded from ftfy and from diffusers' prompt_clean; texts must be equal.
const json& golden() {
  static const json rows = parse_json(read_file(MD_SOURCE_DIR "/tests/golden/data/clean_text.json"))["rows"];
  return rows;
}

TEST(FixText, GivesTheTextsOfFtfy) {
  ASSERT_GT(golden().size(), 500u);
  for (const json& row : golden()) EXPECT_EQ(fix_text(row["text"].get<std::string>()), row["fixed"]) << row["text"];
}

TEST(CleanText, GivesThePromptsOfDiffusers) {
  for (const json& row : golden()) EXPECT_EQ(clean_text(row["text"].get<std::string>()), row["cleaned"]) << row["text"];
}

TEST(CleanText, IsWhatAPromptNeeds) {
  EXPECT_EQ(clean_text(" a  \u201cred\u201d\n cat&amp;dog "), "a \"red\" cat&dog");
  EXPECT_EQ(clean_text("caf\u00c3\u00a9"), "caf\u00e9");                             // é as Latin-1
  EXPECT_EQ(clean_text("caf\u00c3\u0192\u00c2\u00a9"), "caf\u00e9");                 // twice, as Windows-1252
  EXPECT_EQ(clean_text("it\u00e2\u20ac\u2122s \u4eca\u5929"), "it's \u4eca\u5929");  // next to correct text
  EXPECT_EQ(clean_text("caf\u00e9 \u2013 \u5929\u6c14"), "caf\u00e9 \u2013 \u5929\u6c14");
  EXPECT_EQ(clean_text("a\xff"
                       "b"),
            "a\ufffd"
            "b");
}

}  // namespace
}  // namespace md
