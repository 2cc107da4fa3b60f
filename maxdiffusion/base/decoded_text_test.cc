#include "maxdiffusion/base/decoded_text.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/base/test_error.h"

namespace md {
namespace {

using namespace std::string_literals;

void expect_error(std::string_view bytes, const std::string& part) {
  const std::string text = error_of([&] { decoded_text(bytes, "a.txt"); }).what();
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST(DecodedText, LosesItsByteOrderMark) {
  EXPECT_EQ(decoded_text("a\nKätzchen", "it"), "a\nKätzchen");
  EXPECT_EQ(decoded_text("\xef\xbb\xbfKätzchen", "it"), "Kätzchen");
  EXPECT_EQ(decoded_text("", "it"), "");
  EXPECT_EQ(decoded_text("\xef\xbb\xbf", "it"), "");
  EXPECT_EQ(decoded_text("an \xef\xbf\xbd that was written", "it"), "an \xef\xbf\xbd that was written");
}

TEST(DecodedText, OfUtf16WithAMarkIsTheSame) {
  EXPECT_EQ(decoded_text("\xff\xfeK\0\xe4\0\n\0\x3d\xd8\x31\xdc"s, "it"), "Kä\n🐱");
  EXPECT_EQ(decoded_text("\xfe\xff\0K\0\xe4\0\n\xd8\x3d\xdc\x31"s, "it"), "Kä\n🐱");
  EXPECT_EQ(decoded_text("\xff\xfe", "it"), "");
}

TEST(DecodedText, OfAnythingElseIsRefusedWithItsLine) {
  expect_error("one\ntwo \xe9t\xe9", "a.txt:2: byte E9, which is not UTF-8");
  expect_error("one\ntwo\nth\xc3", "a.txt:3: byte C3");
  expect_error("K\0a\0"s, "a.txt:1: a zero byte, as in UTF-16 without a byte order mark");
  expect_error("\xff\xfe\n\0K\0\x3d\xd8"s, "a.txt:2: half a character of UTF-16, D83D");
  expect_error("\xff\xfe\n\0K"s, "a.txt:2: half a character of UTF-16 at the end");
  expect_error("\xff\xfe\0\0K\0\0\0"s, "a.txt:1: a zero");
  expect_error("\xe9", "try: save it as UTF-8");
}

TEST(DecodedText, OfAFileNamesTheFile) {
  const TemporaryFolder folder;
  write_file_atomic(folder / "a.txt", "\xef\xbb\xbfone");
  EXPECT_EQ(read_text_file(folder / "a.txt"), "one");
  write_file_atomic(folder / "a.txt", "one\n\xff");
  const std::string text = error_of([&] { read_text_file(folder / "a.txt"); }).what();
  EXPECT_NE(text.find(folder / "a.txt:2: byte FF"), std::string::npos) << text;
}

}  // namespace
}  // namespace md
