#include "maxdiffusion/tokenizers/placeholders.h"

#include <gtest/gtest.h>

namespace md {
namespace {

using Ids = std::vector<int32_t>;

struct PlaceholdersTest : testing::Test {
  std::shared_ptr<const Tokenizer> base =
      open_tokenizer("CLIPTokenizer", MD_SOURCE_DIR "/tests/golden/pipelines/sd/tokenizer");
  std::shared_ptr<const Tokenizer> with = with_placeholders(base, {{"<dog>", 3}, {"<dog>s", 1}, {"my_style", 1}}, 1000);
  int32_t red = base->tokens("red", 77).at(1);

  Ids inside(const std::string& text) const {
    const Ids ids = with->tokens(text, 77);
    return {ids.begin() + 1, ids.end() - 1};
  }
};

TEST_F(PlaceholdersTest, MeanTheirIdsWhereverTheyAreWordsInAnyCase) {
  EXPECT_EQ(inside("red <dog> red"), (Ids{red, 1000, 1001, 1002, red}));
  EXPECT_EQ(inside("red<DOG>red"), (Ids{red, 1000, 1001, 1002, red}));
  EXPECT_EQ(inside("<dog>s"), Ids{1003});  // the longest
  EXPECT_EQ(inside("My_Style, red"), (Ids{1004, base->tokens(",", 77).at(1), red}));
  const Ids longer = base->tokens("my_styles", 77);  // within a word it is none
  EXPECT_EQ(with->tokens("my_styles", 77), longer);
  EXPECT_EQ(with->tokens("", 77), base->tokens("", 77));
  EXPECT_EQ(with->size(), 1005);
  EXPECT_EQ(with->together(1000), 3);
  EXPECT_EQ(with->together(1001), 1);
  EXPECT_EQ(with_placeholders(base, {}, 1000), base);
}

TEST_F(PlaceholdersTest, AreCutAtTheEndOfTheInput) {
  bool truncated = false;
  EXPECT_EQ(with->tokens("red <dog>", 4, &truncated), (Ids{base->tokens("", 77)[0], red, 1000, base->end_id()}));
  EXPECT_TRUE(truncated);
  with->tokens("red <dog>", 6, &truncated);
  EXPECT_FALSE(truncated);
}

}  // namespace
}  // namespace md
