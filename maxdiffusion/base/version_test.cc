#include "maxdiffusion/base/version.h"

#include <gtest/gtest.h>

#include <string>

#include "maxdiffusion/base/files.h"

namespace md {
namespace {

// P-14
TEST(Version, IsTheProjects) {
  const std::string cmake = read_file(MD_SOURCE_DIR "/CMakeLists.txt");
  EXPECT_NE(cmake.find(std::string("project(maxdiffusion VERSION ") + version() + " "), cmake.npos) << version();
}

}  // namespace
}  // namespace md
