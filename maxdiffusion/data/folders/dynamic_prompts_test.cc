#include "maxdiffusion/data/folders/dynamic_prompts.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

class Dynamic : public testing::Test {
 protected:
  Dynamic() {
    make_folders(t / "w/colours");
    write_file_atomic(t / "secret.txt", "secret");
    write_file_atomic(t / "w/colours/warm.txt", "\xef\xbb\xbf# warm ones\r\n red \r\n\r\n{orange}\n");
    write_file_atomic(t / "w/my_heart.txt", "__warm__ heart");
    write_file_atomic(t / "w/self.txt", "__self__");
    write_file_atomic(t / "w/twice.txt", "__twice2__ __twice2__");
    write_file_atomic(t / "w/twice2.txt", "__twice__");
    write_file_atomic(t / "w/blank.txt", "# nothing\n\n");
    write_file_atomic(t / "w/hair colour.txt", "dark  # rare\nC#\n  # none\n");
  }
  std::string of(const std::string& prompt, uint64_t seed = 0, int64_t image = 0, uint64_t stream = 0) {
    return prompts.chosen("prompt", prompt, seed, image, stream);
  }
  /// The prompts of images 0 to 199.
  std::multiset<std::string> all(const std::string& prompt) {
    std::multiset<std::string> out;
    for (int64_t image = 0; image < 200; ++image) out.insert(of(prompt, 7, image));
    return out;
  }
  std::set<std::string> kinds(const std::string& prompt) {
    const auto texts = all(prompt);
    return {texts.begin(), texts.end()};
  }
  std::string refusal(const std::string& prompt, const std::string& folder = "w") {
    try {
      DynamicPrompts(folder.empty() ? "" : t / folder).chosen("prompt", prompt, 0, 0, 0);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  TemporaryFolder t;
  DynamicPrompts prompts{t / "w"};
};
using Kinds = std::set<std::string>;

TEST_F(Dynamic, NamesInTagsAreNoWildcards) {
  for (const char* prompt : {"a <lora:my__warm__v2:1>", "<lora:__warm__:0.5> b", "<hypernet:a__nothing__b:1>"}) {
    EXPECT_FALSE(DynamicPrompts::has_choices(prompt)) << prompt;
    EXPECT_EQ(of(prompt), prompt);
  }
  EXPECT_EQ(of("{<lora:my__warm__v2:1>}, x"), "<lora:my__warm__v2:1>, x");
  EXPECT_EQ(kinds("<lora:a__b__c:1> __warm__"),
            (std::set<std::string>{"<lora:a__b__c:1> red", "<lora:a__b__c:1> orange"}));
  EXPECT_TRUE(DynamicPrompts::has_choices("a < b, c: __warm__ > d"));
}

TEST_F(Dynamic, FilesMayHaveBlanksInTheirNamesAndCommentsBehindTheirLines) {
  EXPECT_EQ(kinds("__hair colour__ hair"), (Kinds{"dark hair", "C# hair"}));
  EXPECT_TRUE(DynamicPrompts::has_choices("__hair colour__"));
  EXPECT_EQ(of("a__ b __c, d"), "a__ b __c, d");
}

TEST_F(Dynamic, AlternativesAreChosenTextByText) {
  EXPECT_EQ(of("a plain, (weighted:1.2) [prompt] | x } _ __ b"), "a plain, (weighted:1.2) [prompt] | x } _ __ b");
  EXPECT_EQ(kinds("a { red | blue } heart"), (Kinds{"a red heart", "a blue heart"}));
  EXPECT_EQ(kinds("{a|{b|c} d|}"), (Kinds{"a", "b d", "c d", ""}));
  EXPECT_EQ(of("{one}"), "one");
  EXPECT_EQ(of("\\{a\\|b\\} \\(c\\)"), "{a|b} \\(c\\)");
  EXPECT_EQ(of("{a\\|b}"), "a|b");
  EXPECT_EQ(kinds("{x\\}|y}"), (Kinds{"x}", "y"}));
}

TEST_F(Dynamic, WeightsSayHowOftenAlternativesAreChosen) {
  EXPECT_EQ(kinds("{0::a|1::b| 0 ::c}"), Kinds{"b"});
  const auto texts = all("{3::a|b}");
  EXPECT_NEAR(static_cast<double>(texts.count("a")), 150, 20);
  EXPECT_EQ(texts.count("a") + texts.count("b"), 200u);
  EXPECT_EQ(of("{a::b}"), "a::b");  // not a number
}

TEST_F(Dynamic, SeveralAlternativesAreChosenAndJoined) {
  EXPECT_EQ(kinds("{2$$a|b|c}"), (Kinds{"a, b", "a, c", "b, a", "b, c", "c, a", "c, b"}));
  EXPECT_EQ(kinds("x {1-2$$ and $$a|b} y"), (Kinds{"x a y", "x b y", "x a and b y", "x b and a y"}));
  EXPECT_NEAR(static_cast<double>(all("{1-2$$a}").count("a")), 100, 25);
  EXPECT_EQ(kinds("{ 3 $$-$$a|b}").size(), 4u);  // both, then either again
  EXPECT_EQ(of("{3$$$$a}"), "aaa");
  EXPECT_EQ(kinds("{2$$0::a|b| {c|d} }"), (Kinds{"b, c", "b, d", "c, b", "d, b"}));
  EXPECT_EQ(kinds("{2$$__colours/warm__}"), (Kinds{"red, red", "red, orange", "orange, red", "orange, orange"}));
  EXPECT_NEAR(static_cast<double>(all("{2$$8::a|b|b2}").count("b, b2") + all("{2$$8::a|b|b2}").count("b2, b")), 4, 8);
  EXPECT_EQ(of("{a $$ b}"), "a $$ b");  // no number
}

TEST_F(Dynamic, WildcardsAreLinesOfTheirFiles) {
  EXPECT_EQ(kinds("a __colours/warm__ heart"), (Kinds{"a red heart", "a orange heart"}));
  EXPECT_EQ(kinds("__my_heart__, __warm__").size(), 4u);  // a line may refer to other lists; both choose
  EXPECT_EQ(of("snake__case and __init __ x"), "snake__case and __init __ x");
}

TEST_F(Dynamic, SeedAndNumberChooseTheSameOnEveryMachine) {
  const std::string prompt = "{a|b|c|d|e|f|g|h}";
  EXPECT_EQ(of(prompt) + of(prompt, 0, 1) + of(prompt, 1, 0) + of(prompt, 0, 0, 1), "babb");
  EXPECT_EQ(of(prompt, 5, 3), of(prompt, 5, 3));
  EXPECT_GT(kinds(prompt).size(), 7u);
}

TEST_F(Dynamic, RefusesWhatItCannotChoose) {
  for (const auto& [prompt, message] : std::vector<std::pair<std::string, std::string>>{
           {"a {b|c", "prompt: '{' is not closed; expected {a|b}, or \\{ for this letter in \"a {b|c\""},
           {"{0$$a|b}", "prompt: {0$$…}; expected how many to choose, from 1 on, as in {2$$a|b|c} or {1-2$$a|b|c}"},
           {"{3-2$$a|b}", "prompt: {3-2$$…}; expected how many"},
           {"{~2$$a|b}", "prompt: {~2$$…}; expected how many"},
           {"{-2$$a|b}", "prompt: {-2$$…}; expected how many"},
           {"{2000$$a|b}", "prompt: {2000$$…}; expected how many"},
           {"{2$$0::a|0::b}", "prompt: weights whose sum is 0; expected more than 0"},
           {"${x=1} a", "prompt: '${' begins a variable, which is not supported"},
           {"{-1::a|b}", "prompt: the weight -1; expected 0 or more"},
           {"{inf::a|b}", "prompt: the weight inf; expected 0 or more"},
           {"{0::a}", "prompt: weights whose sum is 0; expected more than 0"},
           {"__my_hart__",
            "prompt: __my_hart__ names no file below wildcards_dir='" + (t / "w") + "'; expected one of: my_heart, "},
           {"__../secret__", "prompt: __../secret__ names no file below"},
           {"__colours/../my_heart__", "prompt: __colours/../my_heart__ names no file below"},
           {"__" + (t / "secret") + "__", "names no file below"},
           {"__blank__", "blank.txt' has no lines; expected one or more"},
           {"__self__", "prompt: more than 100 brackets and wildcards in each other"},
           {"__twice__", "prompt: more than 100 brackets and wildcards in each other"},
           {std::string(200, '{') + std::string(200, '}'), "more than 100 brackets"}})
    EXPECT_NE(refusal(prompt).find(message), std::string::npos) << prompt << "\n" << refusal(prompt);
  EXPECT_NE(
      refusal("__a__", "").find("wildcards_dir is empty; expected the folder of 'a.txt', which prompt: __a__ names"),
      std::string::npos)
      << refusal("__a__", "");
  EXPECT_NE(refusal("__a__", "none").find("cannot be listed"), std::string::npos) << refusal("__a__", "none");
  std::string wide = "__warm__";
  for (int i = 0; i < 14; ++i) {
    write_file_atomic(t / fmt::format("w/wide{}.txt", i), wide + " " + wide);
    wide = fmt::format("__wide{}__", i);
  }
  EXPECT_NE(refusal(wide).find("prompt: more than 10000 choices"), std::string::npos) << refusal(wide);
  make_folders(t / "w/others");
  write_file_atomic(t / "w/others/warm.txt", "x");
  EXPECT_NE(refusal("__warm__").find("names two files below"), std::string::npos) << refusal("__warm__");
  EXPECT_EQ(refusal("__others/warm__"), "");
}

}  // namespace
}  // namespace md
