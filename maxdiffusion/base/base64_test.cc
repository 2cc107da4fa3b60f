#include "maxdiffusion/base/base64.h"

#include <gtest/gtest.h>

namespace md {
namespace {

TEST(Base64, IsThatOfRfc4648) {
  const std::pair<std::string, std::string> vectors[] = {{"", ""},
                                                         {"f", "Zg=="},
                                                         {"fo", "Zm8="},
                                                         {"foo", "Zm9v"},
                                                         {"foob", "Zm9vYg=="},
                                                         {"fooba", "Zm9vYmE="},
                                                         {"foobar", "Zm9vYmFy"},
                                                         {"\xfb\xff\xbf", "+/+/"}};
  for (const auto& [bytes, text] : vectors) {
    EXPECT_EQ(to_base64(bytes), text);
    EXPECT_EQ(from_base64(text), bytes);
    EXPECT_EQ(from_base64(text.substr(0, text.find('='))), bytes);
  }
  EXPECT_EQ(from_base64("Zm9v!"), std::nullopt);
  EXPECT_EQ(from_base64("Zm9v\r\nYm\tFy \n"), "foobar");
}

}  // namespace
}  // namespace md
