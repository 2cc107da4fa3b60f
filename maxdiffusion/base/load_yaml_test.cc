#include "maxdiffusion/base/load_yaml.h"

#include <gtest/gtest.h>

namespace md {
namespace {

std::string error_of(const std::string& text) {
  try {
    load_yaml(text);
  } catch (const YAML::Exception& e) {
    return e.msg;
  }
  return "";
}

TEST(LoadYaml, LimitsDepthSizeAndWhatAliasesStandFor) {
  EXPECT_EQ(load_yaml("a: [1, &b {c: 2}, *b]")["a"][2]["c"].as<int>(), 2);
  EXPECT_EQ(error_of("a: " + std::string((size_t{16} << 20) - 3, 'x')), "");
  EXPECT_EQ(error_of("a: " + std::string((size_t{16} << 20) - 2, 'x')),
            "the text has 16777217 bytes, more than 16777216");
  std::string blocks;
  for (int i = 0; i < 100'000; ++i) blocks += "- ";
  for (const std::string& deep : {std::string(100'000, '['), std::string(100'000, '{'), blocks})
    EXPECT_NE(error_of(deep), "") << deep.substr(0, 3);
  std::string nested = "a0: &a0 [x]\n", many = nested;
  for (int i = 1; i < 600; ++i)
    nested += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [*a" + std::to_string(i - 1) + "]\n";
  EXPECT_EQ(error_of(nested), "values nest more than 512 levels deep");
  for (int i = 1; i < 40; ++i) {
    const std::string before = "*a" + std::to_string(i - 1);
    many += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + before + ", " + before + "]\n";
  }
  EXPECT_EQ(error_of(many), "aliases make more than a million values of it");
  EXPECT_EQ(error_of("&a [*a]"), "an alias refers to a node that contains it");
}

}  // namespace
}  // namespace md
