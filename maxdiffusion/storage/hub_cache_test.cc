#include "maxdiffusion/storage/hub_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

class HubCache : public testing::Test {
 protected:
  HubCache() {
    setenv("HF_HUB_CACHE", t.path().c_str(), 1);
    setenv("HF_HUB_OFFLINE", "1", 1);
    for (const char* commit : {"aaa", "bbb"}) make_folders(entry + "/snapshots/" + commit);
    make_folders(entry + "/refs/refs/pr");
    write_file_atomic(entry + "/refs/main", "aaa");
    write_file_atomic(entry + "/refs/refs/pr/95", "bbb\n");
  }
  ~HubCache() override { unsetenv("HF_HUB_CACHE"), unsetenv("HF_HUB_OFFLINE"); }
  static std::string refusal(const std::string& name) {
    try {
      return "found " + local_folder(name);
    } catch (const Error& e) {
      std::string all = e.message();
      for (const auto& note : e.notes()) all += "; " + note;
      return all;
    }
  }
  TemporaryFolder t;
  std::string entry = t / "models--owner--name";
};

// S4-9
TEST_F(HubCache, FoldersComeFirst) {
  EXPECT_EQ(local_folder(t.path()), t.path());
  // A folder with the name of a cached model takes precedence.
  const std::filesystem::path before = std::filesystem::current_path();
  make_folders(t / "here/owner/name");
  std::filesystem::current_path(t / "here");
  const std::string found = local_folder("owner/name");
  std::filesystem::current_path(before);
  EXPECT_EQ(found, "owner/name");
}

// S4-11
TEST_F(HubCache, RevisionsAreBranchesRefsAndCommits) {
  EXPECT_EQ(local_folder("owner/name"), entry + "/snapshots/aaa");
  EXPECT_EQ(local_folder("owner/name", "refs/pr/95"), entry + "/snapshots/bbb");
  EXPECT_EQ(local_folder("owner/name", "bbb"), entry + "/snapshots/bbb");
  EXPECT_EQ(local_folder("hf://owner/name@bbb"), entry + "/snapshots/bbb");
  for (const char* revision : {"not-there", "../../../etc"}) EXPECT_THROW(local_folder("owner/name", revision), Error);
}

TEST_F(HubCache, WhatIsNotCachedIsRefusedOffline) {
  EXPECT_NE(refusal("owner/other").find("HF_HUB_OFFLINE=0"), std::string::npos);
  EXPECT_NE(refusal("../owner").find("there is no file or folder"), std::string::npos);
  write_file_atomic(entry + "/refs/main", "../../../../etc");
  EXPECT_NE(refusal("owner/name").find("no snapshot"), std::string::npos);
}

}  // namespace
}  // namespace md
