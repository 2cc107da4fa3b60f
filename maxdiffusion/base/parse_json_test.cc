#include "maxdiffusion/base/parse_json.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

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

}  // namespace
}  // namespace md
