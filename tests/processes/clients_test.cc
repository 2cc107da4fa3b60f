// Multi-process clients, with a test plugin (tests/plugins/several_processes.cc) whose processes find each other
// through the job's connections as GPU clients do.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/runtime/hardware_keys.h"
#include "tests/processes/job.h"

namespace md {
namespace {

const std::string kPlugin = MD_BINARY_DIR "/test_plugins/several_processes.so";

HardwareKeys gpus() {
  HardwareKeys keys;
  keys.hardware = "gpu";
  keys.plugin = kPlugin;
  return keys;
}

// The code of the processes that the tests below start.
TEST(Member, DISABLED_OpensDevicesTwice) {
  join_processes();
  Processes& all = processes();
  for (int i = 0; i < 2; ++i) {
    const Devices devices = open_devices(
        open_client(gpus()), gpus(), {.ici_data_parallelism = 1, .ici_fsdp_parallelism = -1}, AxisRules::defaults());
    const auto each = static_cast<int64_t>(std::atoi(std::getenv("MD_TEST_DEVICES")));
    EXPECT_EQ(devices.mesh().devices(), each * all.count());
    EXPECT_EQ(devices.replicas(), 1);
    EXPECT_EQ(devices.process(), all.rank());
    EXPECT_EQ(devices.joint(), true);
    std::vector<int64_t> local;
    for (int64_t d = 0; d < each; ++d) local.push_back(all.rank() * each + d);
    EXPECT_EQ(devices.local(), local);
    EXPECT_EQ(share_of_program(devices, 24).rows(24).size(), static_cast<size_t>(24 / all.count()));
    // Each process puts and fetches the shards on its own devices.
    HostArray a(Shape{DType::s32, {24, 2}});
    for (int32_t k = 0; k < 48; ++k) a.mutable_view<int32_t>()[static_cast<size_t>(k)] = k;
    const Array put = devices.put(a, {{{"fsdp"}}}, "a");
    const ShardedArray shards = fetch_shards(devices, put).wait();
    ASSERT_EQ(std::ssize(shards.shards), each);
    for (const Shard& p : shards.shards) EXPECT_EQ(p.values.to_doubles(), ShardedArray(a).read(p.slice).to_doubles());
    EXPECT_THROW(devices.get(put), Error);
    // The plugin rejects transfers to another process's device.
    const Devices local_devices = devices.local_devices();
    EXPECT_FALSE(local_devices.joint());
    EXPECT_EQ(local_devices.mesh().devices(), each);
    EXPECT_EQ(local_devices.get(local_devices.put(a)).to_doubles(), a.to_doubles());
  }
  leave_processes(!HasFailure());
}

TEST(Member, DISABLED_WaitsForOneMore) {
  join_processes();
  Processes& all = processes();
  struct Values final : pjrt::KeyValues {
    void put(const std::string& key, const std::string& value) override { processes().put(key, value); }
    std::optional<std::string> get(const std::string& key) override { return processes().get(key); }
  };
  try {
    pjrt::Client::open("gpu", {{"node_id", all.rank()}, {"num_nodes", all.count() + 1}}, kPlugin,
                       std::make_shared<Values>());
    ADD_FAILURE() << "a process less was enough";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("'local_topology/2' was not set within 300 ms"), std::string::npos) << e.message();
  }
  leave_processes(!HasFailure());
}

std::string member(const std::string& name, const std::string& environment) {
  // Not as a shard of this program's tests.
  return "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX " + environment + " " +
         std::filesystem::read_symlink("/proc/self/exe").string() +
         " --gtest_also_run_disabled_tests --gtest_filter=Member.DISABLED_" + name;
}

// S3-1, S3-2
TEST(JointDevices, AreThoseOfAllProcessesAndEachGivesWorkToItsOwn) {
  const TemporaryFolder t;
  const std::string heard = " MD_TEST_HEARD=" + (t / "heard") + "$PMI_RANK ";
  const JobResult four = run_job(4, member("OpensDevicesTwice", heard + "MD_TEST_DEVICES=1"));
  EXPECT_EQ(four.status, 0) << four.output;
  for (const char* file : {"heard0", "heard1", "heard2", "heard3"})
    EXPECT_EQ(read_file(t / file), "0 0/1\n1 1/1\n2 2/1\n3 3/1\n") << file;
  const JobResult two =
      run_job(2, member("OpensDevicesTwice", heard + "MD_TEST_DEVICES=2 CUDA_VISIBLE_DEVICES=4,5,6,7"));
  EXPECT_EQ(two.status, 0) << two.output;
  for (const char* file : {"heard0", "heard1"}) EXPECT_EQ(read_file(t / file), "0 0/2\n1 2/2\n") << file;
}

TEST(JointDevices, SayThatAProcessIsMissing) {
  const JobResult r = run_job(2, member("WaitsForOneMore", "MD_TEST_TIMEOUT=300"));
  EXPECT_EQ(r.status, 0) << r.output;
}

TEST(JointDevices, AreDividedAmongTheProcessesOfAHost) {
  using Gpus = std::vector<int64_t>;
  EXPECT_EQ(gpus_of_process(0, 1, 8), Gpus());  // all of them
  EXPECT_EQ(gpus_of_process(3, 8, 8), Gpus{3});
  EXPECT_EQ(gpus_of_process(1, 2, 8), (Gpus{4, 5, 6, 7}));
  EXPECT_EQ(gpus_of_process(3, 4, 1), Gpus{0});  // srun --gpus-per-task=1 shows each process only its own
  EXPECT_EQ(gpus_of_process(3, 4, 0), Gpus{3});
  EXPECT_THROW(gpus_of_process(0, 3, 8), Error);
}

}  // namespace
}  // namespace md
