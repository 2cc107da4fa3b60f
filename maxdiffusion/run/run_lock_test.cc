#include "maxdiffusion/run/run_lock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"

namespace md {
namespace {

TEST(RunLock, NamesTheProcessThatHoldsIt) {
  const TemporaryFolder t;
  const std::string folder = t.path() + "/runs/mine";
  auto first = std::make_unique<RunLock>(folder);
  const std::string me = "process " + std::to_string(::getpid()) + " on ";
  EXPECT_EQ(read_file(folder + "/.lock").rfind(me, 0), 0u);
  try {
    RunLock second(folder, std::chrono::seconds(0));
    FAIL() << "two runs in one folder";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    EXPECT_EQ(e.message().rfind("'" + folder + "' is in use by " + me, 0), 0u) << e.message();
    EXPECT_NE(e.message().find(", started 2"), std::string::npos) << e.message();
  }
  const RunLock other(t.path() + "/runs/other");
  first.reset();
  const RunLock again(folder);
}

TEST(RunLock, WaitsForOneThatEnds) {
  const TemporaryFolder t;
  auto first = std::make_unique<RunLock>(t.path());
  const std::jthread ending([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    first.reset();
  });
  testing::internal::CaptureStderr();
  const RunLock second(t.path());
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("'" + t.path() + "' is in use; waiting up to 10 s for the run there to end"), log.npos) << log;
}

TEST(RunLock, NamesAFolderThatIsThereNoMore) {
  namespace fs = std::filesystem;
  const TemporaryFolder t;
  const std::string folder = t / "runs/mine";
  const auto error = [&](const RunLock& lock) -> std::string {
    try {
      lock.check_folder();
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  {
    const RunLock lock(folder);
    write_file_atomic(folder + "/config.yml", "a: 1");
    EXPECT_EQ(error(lock), "");
    fs::remove(folder + "/.lock");  // by hand: the run's files are there
    EXPECT_EQ(error(lock), "");
    fs::rename(folder, t / "elsewhere");
    EXPECT_EQ(error(lock), "'" + folder + "' was deleted or moved while this run wrote to it");
    const RunLock other(folder);  // a new run there
    EXPECT_EQ(error(lock), "'" + folder + "' was deleted or moved while this run wrote to it");
    EXPECT_EQ(error(other), "");
  }
  EXPECT_FALSE(exists(folder));
  auto lock = std::make_unique<RunLock>(folder);
  fs::remove_all(folder);
  const RunLock other(folder);
  lock.reset();
  EXPECT_TRUE(exists(folder + "/.lock"));  // that of the other run
}

}  // namespace
}  // namespace md
