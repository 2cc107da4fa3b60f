// The program's command lines: help, exit statuses, and what bad words are answered with.
#include <gtest/gtest.h>

#include "tests/cli/command.h"

namespace md {
namespace {

TEST(Program, WithoutWordsSaysWhatItCanDo) {
  Outcome o = maxdiffusion({});
  EXPECT_EQ(o.status, 0);
  EXPECT_TRUE(contains(o.out, "prepare_emoji FOLDER")) << o.out;
  EXPECT_EQ(maxdiffusion({"help"}).out, o.out);
  EXPECT_EQ(maxdiffusion({"--help"}).out, o.out);
}

TEST(Program, UnknownCommandNamesTheNearest) {
  Outcome o = maxdiffusion({"prepare_emojis"});
  EXPECT_EQ(o.status, 2);
  EXPECT_EQ(o.out, "");
  EXPECT_EQ(o.err,
            "error: there is no command 'prepare_emojis'\n  did you mean 'prepare_emoji'?\n  try: maxdiffusion help\n");
  EXPECT_FALSE(contains(maxdiffusion({"frobnicate"}).err, "did you mean"));
}

TEST(Program, PrepareEmojiRefusesBadWords) {
  EXPECT_TRUE(contains(maxdiffusion({"prepare_emoji"}).err, "the folder to write to is missing"));
  TemporaryFolder folder;
  Outcome o = maxdiffusion({"prepare_emoji", folder / "a", "resolutoin=32"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "command line: there is no key `resolutoin`")) << o.err;
  EXPECT_TRUE(contains(o.err, "did you mean `resolution`?")) << o.err;
  o = maxdiffusion({"prepare_emoji", folder / "a", "resolution=big"});
  EXPECT_EQ(o.status, 2);
  EXPECT_TRUE(contains(o.err, "resolution is `big`, expected a whole number")) << o.err;
  o = maxdiffusion({"prepare_emoji", folder / "a", "resolution"});
  EXPECT_EQ(o.status, 2);
  EXPECT_FALSE(exists(folder / "a"));
}

TEST(Program, FilesThatAreNotThereAreIoErrors) {
  TemporaryFolder folder;
  Outcome o = maxdiffusion({"prepare_emoji", folder / "a", "font=/nowhere/font.ttf"});
  EXPECT_EQ(o.status, 4);
  EXPECT_TRUE(contains(o.err, "/nowhere/font.ttf")) << o.err;
}

}  // namespace
}  // namespace md
