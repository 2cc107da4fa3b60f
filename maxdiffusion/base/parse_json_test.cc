#include "maxdiffusion/base/parse_json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_unique_json.h"

namespace md {
namespace {

using nlohmann::json;

TEST(ParseJson, NumbersThatPythonWritesAreRead) {
  const char* text = R"({"a": -Infinity, "b": [Infinity, 1], "c": "say \"NaN\" \\", "d": {"e": NaN}})";
  const json j = parse_json(text);
  EXPECT_EQ(j["a"], json(-HUGE_VAL));
  EXPECT_EQ(j["b"], json({HUGE_VAL, 1}));
  EXPECT_EQ(j["c"], "say \"NaN\" \\");
  EXPECT_TRUE(std::isnan(j["d"]["e"].get<double>()));
  EXPECT_EQ(parse_json_or_discard(text)["b"], j["b"]);
  // They are written as Python reads them.
  EXPECT_EQ(dump_json(j), R"({"a":-Infinity,"b":[Infinity,1],"c":"say \"NaN\" \\","d":{"e":NaN}})");
  EXPECT_EQ(dump_json({{"a", 1.5}, {"b", "Infinity"}}, 1), "{\n \"a\": 1.5,\n \"b\": \"Infinity\"\n}");
}

TEST(ParseJson, InvalidJsonIsRefusedWithItsPosition) {
  for (const char* text :
       {"{\"a\": Infinit}", "{\"a\": NaNs}", "{\"a\": +Infinity}", "{\"a\": inf}", "NaN NaN", "{\"a"}) {
    EXPECT_TRUE(parse_json_or_discard(text).is_discarded()) << text;
    try {
      parse_json(text);
      ADD_FAILURE() << text;
    } catch (const json::parse_error& e) {
      EXPECT_NE(std::string(e.what()).find("line 1, column"), std::string::npos) << e.what();
    }
  }
}

TEST(ParseJson, NestingIsLimited) {
  const auto nested = [](const std::string& open, int levels, const std::string& close) {
    std::string text;
    for (int i = 0; i < levels; ++i) text += open;
    text += "1";
    for (int i = 0; i < levels; ++i) text += close;
    return text;
  };
  EXPECT_NO_THROW(parse_json(nested("[", 512, "]")));
  EXPECT_NO_THROW(parse_json(nested("{\"a\":", 512, "}")));
  // Brackets of texts, and of values side by side, are no levels.
  EXPECT_EQ(parse_json("[\"" + std::string(1000, '[') + "\\\"{\"]")[0].get<std::string>().size(), 1002u);
  EXPECT_EQ(parse_json("[[]" + nested(",[]", 1000, "").substr(0, 3000) + "]").size(), 1001u);
  for (const auto& [open, close] :
       {std::pair("[", "]"), std::pair("{\"a\":", "}"), std::pair("[{\"\\\\\":", "}]"), std::pair("[", "")})
    for (const int levels : {513, 100'000}) {
      const std::string text = nested(open, levels, close);
      EXPECT_TRUE(parse_json_or_discard(text).is_discarded()) << open << levels;
      try {
        parse_json(text);
        ADD_FAILURE() << open << levels;
      } catch (const json::parse_error& e) {
        EXPECT_NE(std::string(e.what()).find("nested more than 512 levels deep"), std::string::npos) << e.what();
      }
    }
}

TEST(ParseJson, SizeIsLimited) {
  std::string text((size_t{512} << 20) + 1, ' ');
  text[0] = '1';
  EXPECT_TRUE(parse_json_or_discard(text).is_discarded());
  try {
    parse_json(text);
    ADD_FAILURE();
  } catch (const json::parse_error& e) {
    EXPECT_NE(std::string(e.what()).find("the text has 536870913 bytes; expected at most 536870912"), std::string::npos)
        << e.what();
  }
}

TEST(ParseUniqueJson, NamesAKeyThatStandsTwice) {
  const auto error = [](const std::string& text, int depth) -> std::string {
    try {
      parse_unique_json(text, depth);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(parse_unique_json(R"({"a": {"b": 1}, "b": {"b": 2}})", 2)["b"]["b"], 2);
  EXPECT_EQ(error(R"({"a": 1, "b": 2, "a": 3})", 0), "'a' is named twice");
  EXPECT_EQ(error(R"({"a": {"b": 1, "b": 2}})", 0), "");
  EXPECT_EQ(error(R"({"a": {"b": 1, "b": 2}})", 1), "'b' is named twice");
  EXPECT_THROW(parse_unique_json(std::string(100'000, '['), 1), json::parse_error);
  EXPECT_THROW(parse_unique_json("{", 1), json::parse_error);
}

}  // namespace
}  // namespace md
