// The operation that sums over processes, in programs that run in several processes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "maxdiffusion/ops/process_sum.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/processes/job.h"

namespace md {
namespace {

float value(int64_t rank, int64_t i) {
  return std::sin(static_cast<float>(i * 7 + rank * 1000)) * std::pow(10.0f, static_cast<float>(i % 9 - 4));
}

/// Sums arrays of n elements and a scalar, different in each process, on a mesh of `devices` devices per process.
void expect_sums(int64_t devices, int64_t n) {
  Processes& all = processes();
  const Devices local = Devices::open("cpu", devices, {.ici_data_parallelism = 1, .ici_fsdp_parallelism = devices});
  all.open_sums(devices);
  Graph g(local.graph_options(&local.rules()));
  const Tensor split = g.input("split", {DType::f32, {n}}, {"embed"}), whole = g.input("whole", {DType::f32, {3, 2}}),
               scalar = g.input("scalar", {DType::f32, {}});
  const DimAxes fsdp = {{"fsdp"}};
  const std::vector<Tensor> sums =
      process_sum({split, whole, scalar}, {devices > 1 ? fsdp : DimAxes(1), DimAxes(2), DimAxes(0)}, 0.5);
  for (Tensor s : sums) g.output("sum" + std::to_string(g.outputs().size()), s);
  HostArray a(Shape{DType::f32, {n}}), b(Shape{DType::f32, {3, 2}}), c(Shape{DType::f32, {}});
  for (int64_t i = 0; i < n; ++i) a.mutable_view<float>()[static_cast<size_t>(i)] = value(all.rank(), i);
  for (size_t i = 0; i < 6; ++i) b.mutable_view<float>()[i] = value(all.rank(), static_cast<int64_t>(i));
  c.mutable_view<float>()[0] = static_cast<float>(all.rank());
  const std::vector<HostArray> found = evaluate(local, g, {a, b, c});
  auto expected = [&](int64_t i) {  // in rank order
    float sum = value(0, i);
    for (int64_t r = 1; r < all.count(); ++r) sum += value(r, i);
    return sum * 0.5f;
  };
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(found[0].view<float>()[static_cast<size_t>(i)], expected(i)) << i;
  for (int64_t i = 0; i < 6; ++i) ASSERT_EQ(found[1].view<float>()[static_cast<size_t>(i)], expected(i)) << i;
  EXPECT_EQ(found[2].view<float>()[0], static_cast<float>(all.count() * (all.count() - 1)) / 4);
}

// The code of the processes that the tests below start.
TEST(Member, DISABLED_Sums) {
  join_processes();
  for (int64_t devices : {1, 2})
    for (int64_t n : {2, 1000}) expect_sums(devices, n);
  std::vector<float> large((size_t{1} << 22) + 5);  // more than one message holds
  for (size_t i = 0; i < large.size(); ++i) large[i] = value(processes().rank(), static_cast<int64_t>(i));
  std::vector<float> small = {static_cast<float>(processes().rank())};
  const std::span<float> both[] = {small, large};
  processes().sum(1, both, 1);
  for (size_t i = 0; i < large.size(); i += 1001) {
    float sum = value(0, static_cast<int64_t>(i));
    for (int64_t r = 1; r < processes().count(); ++r) sum += value(r, static_cast<int64_t>(i));
    ASSERT_EQ(large[i], sum) << i;
  }
  std::vector<std::byte> bytes((size_t{1} << 28) + 3, static_cast<std::byte>(7 + processes().rank()));
  processes().broadcast(bytes);
  EXPECT_EQ(std::ranges::count(bytes, std::byte{7}), std::ssize(bytes));
  EXPECT_EQ(processes().largest("largest", processes().rank()), processes().count() - 1);
  leave_processes(!HasFailure());
}

std::string this_test(const std::string& member) {
  return std::filesystem::read_symlink("/proc/self/exe").string() +
         " --gtest_also_run_disabled_tests --gtest_filter=Member.DISABLED_" + member;
}

TEST(ProcessSum, AddsInTheOrderOfRanksOnOneDeviceAndOnTwo) {
  for (int n : {2, 3}) {
    const JobResult r = run_job(n, this_test("Sums"));
    EXPECT_EQ(r.status, 0) << r.output;
  }
}

}  // namespace
}  // namespace md
