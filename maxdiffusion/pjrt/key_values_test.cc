// Clients of several processes, in real processes: this program started again for each of them.
#include "maxdiffusion/pjrt/key_values.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/pjrt/client.h"

namespace md::pjrt {
namespace {

TEST(KeyValues, OfAFolderAreSeenByWhoeverOpensIt) {
  const TemporaryFolder t;
  const auto one = key_values_in(t / "run/1"), other = key_values_in(t / "run/1");
  EXPECT_EQ(one->get("a"), std::nullopt);
  const std::string odd(300, '/'), bytes("\0\n\xff", 3);
  one->put("a", bytes);
  one->put(odd, "");
  EXPECT_EQ(other->get("a"), bytes);
  EXPECT_EQ(other->get(odd), "");
  EXPECT_EQ(key_values_in(t / "run/2")->get("a"), std::nullopt);
}

/// One process of several, of which the environment says the number; its error goes to a file.
TEST(KeyValuesOfProcesses, DISABLED_OneOfThem) {
  const std::string folder = std::getenv("MD_TEST_FOLDER"), me = std::getenv("MD_TEST_NODE");
  try {
    const int64_t node = std::atoll(me.c_str());
    const auto client = Client::open("cpu",
                                     {{"node_id", node},
                                      {"num_nodes", int64_t{std::atoll(std::getenv("MD_TEST_NODES"))}},
                                      {"visible_devices", std::vector<int64_t>{node + 10}}},
                                     MD_TEST_PLUGINS "/several_processes.so", key_values_in(folder + "/keys"));
    EXPECT_FALSE(client->devices().empty());
  } catch (const Error& e) {
    write_file_atomic(folder + "/error" + me, e.what());
  }
}

/// Starts the processes `nodes` of a run of `all`, and waits until they have ended.
void start(const std::string& folder, const std::vector<int>& nodes, int all, const char* timeout) {
  std::vector<pid_t> children;
  for (const int node : nodes) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    ::setenv("MD_TEST_FOLDER", folder.c_str(), 1);
    ::setenv("MD_TEST_NODE", std::to_string(node).c_str(), 1);
    ::setenv("MD_TEST_NODES", std::to_string(all).c_str(), 1);
    ::setenv("MD_TEST_HEARD", (folder + "/heard" + std::to_string(node)).c_str(), 1);
    ::setenv("MD_TEST_TIMEOUT", timeout, 1);
    ::unsetenv("GTEST_TOTAL_SHARDS");
    ::execl("/proc/self/exe", "pjrt_test", "--gtest_filter=KeyValuesOfProcesses.DISABLED_OneOfThem",
            "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr);
    ::_exit(127);
  }
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

TEST(KeyValuesOfProcesses, LetFourClientsFindEachOther) {
  const TemporaryFolder t;
  start(t.path(), {3, 1, 0, 2}, 4, "60000");
  for (const char* file : {"/heard0", "/heard1", "/heard2", "/heard3"})
    EXPECT_EQ(read_file(t.path() + file), "0 10/1\n1 11/1\n2 12/1\n3 13/1\n") << file;
}

TEST(KeyValuesOfProcesses, SayThatOneIsMissing) {
  const TemporaryFolder t;
  start(t.path(), {0, 1}, 3, "300");
  for (const char* file : {"/error0", "/error1"})
    EXPECT_NE(read_file(t.path() + file).find("no process has given 'local_topology/2' in 300 ms"), std::string::npos)
        << read_file(t.path() + file);
}

TEST(KeyValuesOfProcesses, SayWhatIsWrongWithTheirFolder) {
  const TemporaryFolder t;
  write_file_atomic(t / "keys", "a file");
  start(t.path(), {0}, 1, "300");
  EXPECT_NE(read_file(t / "error0").find(t / "keys"), std::string::npos) << read_file(t / "error0");
}

}  // namespace
}  // namespace md::pjrt
