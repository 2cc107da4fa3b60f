#include "maxdiffusion/data/folders/caption_rules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

std::vector<std::string> many(const CaptionRules& rules, const std::string& text, int n = 2000) {
  std::vector<std::string> out;
  for (int i = 0; i < n; ++i) out.push_back(applied(rules, text, static_cast<uint64_t>(i), "it"));
  return out;
}
std::set<std::string> kinds(const CaptionRules& rules, const std::string& text) {
  const auto all = many(rules, text);
  return {all.begin(), all.end()};
}
std::vector<std::string> tags(const std::string& text) {
  std::vector<std::string> out;
  for (size_t begin = 0;;) {
    const size_t end = text.find(", ", begin);
    out.push_back(text.substr(begin, end - begin));
    if (end == text.npos) return out;
    begin = end + 2;
  }
}

TEST(CaptionRules, WithoutRulesLeaveATextAsItIs) {
  EXPECT_EQ(kinds({}, "a,  b\nc "), std::set<std::string>{"a,  b\nc "});
  EXPECT_FALSE(varies({}, "a, {b|c}\nd"));
}

TEST(CaptionRules, ShuffleAllTagsButTheFirstN) {
  const CaptionRules rules{.shuffle = true, .keep_tokens = 2};
  EXPECT_TRUE(varies(rules, "a, b, c, d, e"));
  std::map<std::string, int> times;
  for (const std::string& text : many(rules, "a,b ,c, d, e")) {
    EXPECT_TRUE(text.starts_with("a, b, ")) << text;
    std::vector<std::string> sorted = tags(text);
    std::ranges::sort(sorted);
    EXPECT_EQ(sorted, (std::vector<std::string>{"a", "b", "c", "d", "e"}));
    ++times[text];
  }
  ASSERT_EQ(times.size(), 6u);  // three tags have six orders
  for (const auto& [text, n] : times) EXPECT_NEAR(n, 2000.0 / 6, 70) << text;
  EXPECT_EQ(kinds({.shuffle = true, .keep_tokens = 9}, "a, b"), std::set<std::string>{"a, b"});
}

TEST(CaptionRules, KeepWhatIsAroundTheSeparatorOfKeptTags) {
  // The example from sd-scripts' documentation.
  EXPECT_EQ(kinds({.shuffle = true, .keep_separator = "|||"}, "aaa, bbb ||| ccc, ddd ||| ggg, hhh"),
            (std::set<std::string>{"aaa, bbb, ccc, ddd, ggg, hhh", "aaa, bbb, ddd, ccc, ggg, hhh"}));
  EXPECT_EQ(kinds({.keep_separator = "|||"}, "aaa ||| ccc, ddd"), std::set<std::string>{"aaa, ccc, ddd"});
}

TEST(CaptionRules, TagsOfASecondarySeparatorStayTogether) {
  EXPECT_EQ(kinds({.shuffle = true, .secondary_separator = ";;;"}, "sky;;;cloud, sea"),
            (std::set<std::string>{"sky,cloud, sea", "sea, sky,cloud"}));
  EXPECT_EQ(kinds({.secondary_separator = ";;;"}, "aaa;;;bbb;;;ccc"), std::set<std::string>{"aaa,bbb,ccc"});
}

TEST(CaptionRules, DropTagsByTheirProbabilityButNoneThatIsKept) {
  const CaptionRules rules{.keep_tokens = 1, .tag_dropout = 0.25};
  std::map<std::string, int> times;
  for (const std::string& text : many(rules, "a, b, c", 8000))
    for (const std::string& tag : tags(text)) ++times[tag];
  EXPECT_EQ(times["a"], 8000);
  EXPECT_NEAR(times["b"], 6000, 160);
  EXPECT_NEAR(times["c"], 6000, 160);
  EXPECT_EQ(kinds({.tag_dropout = 1}, "a, b"), std::set<std::string>{""});
}

TEST(CaptionRules, DropCaptionsByTheirProbability) {
  int dropped = 0;
  for (uint64_t i = 0; i < 8000; ++i) dropped += drops_caption({.dropout = 0.1}, i);
  EXPECT_NEAR(dropped, 800, 110);
  EXPECT_FALSE(drops_caption({}, 0));
  EXPECT_TRUE(drops_caption({.dropout = 1}, 7));
}

TEST(CaptionRules, ChooseWordsAndLines) {
  const CaptionRules rules{.lines = CaptionRules::Lines::any, .wildcards = true};
  EXPECT_EQ(kinds(rules, "{simple|white} background\n\nb"),
            (std::set<std::string>{"simple background", "white background", "b"}));
  EXPECT_EQ(kinds(rules, "hatsune, {{retro style}}, __x__"), std::set<std::string>{"hatsune, {retro style}, __x__"});
  EXPECT_EQ(kinds({.lines = CaptionRules::Lines::first}, "\na\nb"), std::set<std::string>{"a"});
  EXPECT_FALSE(varies(rules, "one line"));
  EXPECT_TRUE(varies(rules, "{a|b}"));
  EXPECT_TRUE(varies(rules, "a\nb"));
  EXPECT_THROW(applied(rules, "a {b", 0, "it"), Error);
}

TEST(CaptionRules, PutTextAroundCaptionsAndTriggersIn) {
  EXPECT_EQ(
      kinds({.prefix = "1girl |||", .suffix = ", anime ||| best", .shuffle = true, .keep_separator = "|||"}, "sky"),
      (std::set<std::string>{"1girl, sky, anime, best", "1girl, anime, sky, best"}));
  const CaptionRules trigger{.trigger = "p3r5on", .add_trigger = true};
  EXPECT_EQ(kinds(trigger, "[trigger] at sea"), std::set<std::string>{"p3r5on at sea"});
  EXPECT_EQ(kinds(trigger, "at sea"), std::set<std::string>{"p3r5on at sea"});
  EXPECT_EQ(kinds(trigger, "a p3r5on"), std::set<std::string>{"a p3r5on"});
  EXPECT_EQ(kinds({.trigger = "p3r5on"}, "at sea"), std::set<std::string>{"at sea"});
}

}  // namespace
}  // namespace md
