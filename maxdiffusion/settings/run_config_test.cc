#include "maxdiffusion/settings/run_config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "maxdiffusion/base/error.h"

namespace md {
namespace {

/// Whether the key accepts this command-line text; if not, checks that the error names the key.
bool accepts(const ConfigKey& key, const std::string& text) {
  try {
    key.set({.text = text, .where = kCommandLine, .kind = ConfigValue::Kind::word});
    return true;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::invalid_config);
    EXPECT_TRUE(e.message().starts_with(fmt::format("config: command line: {} is `{}`, expected ", key.name, text)))
        << e.message();
    return false;
  }
}

TEST(RunConfigKeys, TakeTheirDefaultsAndNothingBeyondTheirRanges) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  const std::string defaults = keys.to_yaml();
  keys.assign(ConfigSource::from_text(defaults));
  EXPECT_EQ(keys.to_yaml(), defaults);
  int ranges = 0;
  for (const ConfigKey& key : keys.keys()) {
    if (!key.range) continue;
    ++ranges;
    for (const auto& [end, step] : {std::pair{key.range->least, -1.0}, {key.range->most, 1.0}}) {
      if (!std::isfinite(end.value)) continue;
      EXPECT_EQ(accepts(key, fmt::format("{}", end.value)), !end.excluded) << key.line();
      EXPECT_FALSE(accepts(key, fmt::format("{}", end.value + step))) << key.line();
    }
    for (const char* word : {"inf", "-inf", "nan"}) EXPECT_FALSE(accepts(key, word)) << key.line();
  }
  EXPECT_GE(ranges, 26);
}

TEST(RunConfigKeys, TakeTheWordsOfTheirListsAlone) {
  RunConfig c;
  KeyList keys;
  keys.add(c);
  int lists = 0;
  for (const ConfigKey& key : keys.keys()) {
    if (!key.words) continue;
    ++lists;
    for (const std::string& word : key.words->words) EXPECT_TRUE(accepts(key, word)) << key.line();
    EXPECT_FALSE(accepts(key, "neither")) << key.line();
    EXPECT_EQ(accepts(key, ""), key.words->or_empty) << key.line();
  }
  EXPECT_GE(lists, 9);
}

}  // namespace
}  // namespace md
