#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/storage/storage.h"

namespace md {
namespace {

using Texts = std::vector<std::string>;

class ListInputs : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* file :
         {"[artist] set/1.png", "a set/2.png", "a, b/3.png", "a/4.png", "what?/c, d, e.tar", "c.tar"}) {
      std::filesystem::create_directories(std::filesystem::path(t / file).parent_path());
      write_file_atomic(t / file, "x");
    }
  }
  /// The names below the folder.
  Texts listed(const std::string& locations) {
    Texts names;
    for (const FoundFile& f : list_inputs(locations)) names.push_back(f.location.substr((t / "").size()));
    return names;
  }
  TemporaryFolder t;
};

TEST_F(ListInputs, NamesAreNoPatterns) {
  EXPECT_EQ(listed(t / "[artist] set"), Texts{"[artist] set/1.png"});
  EXPECT_EQ(listed(t / "[artist] set/*.png"), Texts{"[artist] set/1.png"});
  EXPECT_EQ(listed(t / "what?/*.t?r"), Texts{"what?/c, d, e.tar"});
}

TEST_F(ListInputs, APatternIsOneWhereNothingHasItsName) {
  EXPECT_EQ(listed(t / "[ab] set/*"), Texts{"a set/2.png"});
  EXPECT_EQ(listed(t / "?/*"), Texts{"a/4.png"});
  EXPECT_EQ(listed(t / "**/[34].png"), (Texts{"a, b/3.png", "a/4.png"}));
}

TEST_F(ListInputs, CommasInNamesSeparateNothing) {
  EXPECT_EQ(listed(t / "a, b"), Texts{"a, b/3.png"});
  EXPECT_EQ(listed((t / "a, b") + "," + (t / "a")), (Texts{"a, b/3.png", "a/4.png"}));
  EXPECT_EQ(listed((t / "a") + ", " + (t / "what?/c, d, e.tar") + " ," + (t / "c.tar")),
            (Texts{"a/4.png", "what?/c, d, e.tar", "c.tar"}));
  EXPECT_EQ(split_locations("x,y , z"), (Texts{"x", "y", "z"}));
  EXPECT_EQ(split_locations("gs://b/x, y,gs://b/z"), (Texts{"gs://b/x", "y", "gs://b/z"}));
  EXPECT_THROW(list_inputs((t / "a, c")), Error);
}

}  // namespace
}  // namespace md
