#include "maxdiffusion/base/split_at_commas.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

using Texts = std::vector<std::string>;

TEST(SplitAtCommas, OneTextIsSplitAndAListIsNot) {
  EXPECT_EQ(split_at_commas({"a, b ,,c"}), (Texts{"a", "b", "c"}));
  EXPECT_EQ(split_at_commas({"a, b", "c"}), (Texts{"a, b", "c"}));
  EXPECT_EQ(split_at_commas({""}), Texts());
  EXPECT_EQ(split_at_commas({}), Texts());
  EXPECT_EQ(split_paths({"x, y.png", "z.png"}), (Texts{"x, y.png", "z.png"}));
}

TEST(SplitAtCommas, APathThatExistsStaysWhole) {
  TemporaryFolder t;
  write_file_atomic(t / "a, b.png", "");
  EXPECT_EQ(split_paths({t / "a, b.png"}), Texts{t / "a, b.png"});
  EXPECT_EQ(split_paths({"c, d.png"}), (Texts{"c", "d.png"}));
  EXPECT_EQ(split_paths({"c.png," + (t / "a, b.png") + ", d.png"}), (Texts{"c.png", t / "a, b.png", "d.png"}));
}

}  // namespace
}  // namespace md
