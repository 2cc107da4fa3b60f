#include "maxdiffusion/base/host_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <vector>

namespace md {
namespace {

TEST(HostMemory, IsWhatALimitLeaves) {
  EXPECT_GT(status_bytes("VmHWM"), 0);
  EXPECT_GE(status_bytes("VmHWM"), status_bytes("VmRSS"));
  EXPECT_EQ(status_bytes("NoSuchField"), 0);
  EXPECT_GT(free_memory(), 0);
  EXPECT_LE(free_memory(), memory_limit());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  constexpr int64_t kRoom = int64_t{50} << 20;
  const int64_t limit = status_bytes("VmSize") + kRoom;
  const rlimit less{static_cast<rlim_t>(limit), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &less), 0);
  EXPECT_EQ(memory_limit(), limit);
  EXPECT_LE(free_memory(), kRoom);
  EXPECT_GT(free_memory(), kRoom / 2);
  const std::vector<char> allocated(size_t{30} << 20);
  EXPECT_LE(free_memory(), kRoom - (int64_t{30} << 20));
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
}

}  // namespace
}  // namespace md
