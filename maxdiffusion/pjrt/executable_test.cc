// Programs on both CPU plugins: from text to results; donation, several devices, serialization, errors.
#include "maxdiffusion/pjrt/executable.h"

#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/pjrt/every_cpu_plugin.h"

namespace md::pjrt {
namespace {

class Executables : public EveryCpuPlugin {};
MD_ON_EVERY_CPU_PLUGIN(Executables);

constexpr const char* kAddOne = R"(module @add_one {
  func.func public @main(%x: tensor<1024xf32>) -> tensor<1024xf32> {
    %c = stablehlo.constant dense<1.0> : tensor<1024xf32>
    %y = stablehlo.add %x, %c : tensor<1024xf32>
    return %y : tensor<1024xf32>
  }
})";
constexpr const char* kAddOneDonated = R"(module @add_one {
  func.func public @main(%x: tensor<1024xf32> {tf.aliasing_output = 0 : i32}) -> tensor<1024xf32> {
    %c = stablehlo.constant dense<1.0> : tensor<1024xf32>
    %y = stablehlo.add %x, %c : tensor<1024xf32>
    return %y : tensor<1024xf32>
  }
})";
const Shape kShape{DType::f32, {1024}};

Buffer counting(const Client& client, size_t device = 0) {
  std::vector<float> values(1024);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const HostArray a = HostArray::of<float>(kShape, values);
  return client.put(client.devices()[device].id, kShape, a.data(), {}, a.owner());
}

double element(const Buffer& b, size_t i) {
  HostArray a(kShape);
  b.copy_to_host(a.mutable_data(), a.bytes(), 1).wait();
  return a.view<float>()[i];
}

TEST_P(Executables, RunsText) {
  auto client = open();
  auto exe = Executable::compile(*client, kAddOne, {.device_ids = {client->devices()[0].id}, .flags = {}});
  Buffer x = counting(*client);
  auto out = exe.run({{&x}});
  EXPECT_EQ(element(out[0][0], 1023), 1024.0);
  EXPECT_EQ(element(x, 1023), 1023.0) << "an argument that is not donated keeps its contents";
  EXPECT_FALSE(x.deleted());
}

TEST_P(Executables, DonationReusesTheMemory) {
  auto client = open();
  auto exe = Executable::compile(*client, kAddOneDonated, {.device_ids = {client->devices()[0].id}, .flags = {}});
  auto plan = exe.compiled().memory();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->aliased, 4096);
  EXPECT_EQ(plan->arguments, 4096);
  Buffer x = counting(*client);
  x.wait();
  const uintptr_t before = x.address();
  auto out = exe.run({{&x}});
  EXPECT_TRUE(x.deleted());
  EXPECT_EQ(element(out[0][0], 7), 8.0);
  EXPECT_EQ(out[0][0].address(), before);
}

TEST_P(Executables, SavedProgramsLoadAndRun) {
  auto client = open();
  auto exe = Executable::compile(*client, kAddOne, {.device_ids = {client->devices()[0].id}, .flags = {}});
  const std::string bytes = exe.compiled().serialize();
  EXPECT_FALSE(bytes.empty());
  auto loaded = Executable::load(*client, bytes);
  Buffer x = counting(*client);
  EXPECT_EQ(element(loaded.run({{&x}})[0][0], 3), 4.0);
  EXPECT_THROW(Executable::load(*client, "not an executable"), Error);
}

TEST_P(Executables, PartitionsOverDevicesInTheOrderGiven) {
  auto client = open(4);
  constexpr const char* text = R"(module @sum attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%x: tensor<4096xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}]>})
      -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh, []>}) {
    %z = stablehlo.constant dense<0.0> : tensor<f32>
    %s = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [0] : (tensor<4096xf32>, tensor<f32>) -> tensor<f32>
    return %s : tensor<f32>
  }
})";
  std::vector<int> ids;
  for (size_t i : {2, 0, 3, 1}) ids.push_back(client->devices()[i].id);
  auto exe = Executable::compile(*client, text, {.device_ids = ids, .flags = {}});
  ASSERT_EQ(exe.device_ids().size(), 4u);
  std::vector<Buffer> shards;
  std::vector<std::vector<const Buffer*>> inputs;
  for (int id : exe.device_ids())
    for (size_t i = 0; i < 4; ++i)
      if (client->devices()[i].id == id) shards.push_back(counting(*client, i));
  for (const Buffer& b : shards) inputs.push_back({&b});
  for (auto& out : exe.run(inputs)) {
    float sum = 0;
    out[0].copy_to_host(&sum, sizeof sum, 0).wait();
    EXPECT_EQ(sum, 4 * 1023 * 512.0f);
  }
}

TEST_P(Executables, CompilerFlagsReachTheCompiler) {
  auto client = open();
  const std::vector<int> ids = {client->devices()[0].id};
  EXPECT_NO_THROW(
      Executable::compile(*client, kAddOne, {.device_ids = ids, .flags = {{"xla_backend_optimization_level", "1"}}}));
  EXPECT_THROW(Executable::compile(*client, kAddOne, {.device_ids = ids, .flags = {{"xla_no_such_flag", "1"}}}), Error);
}

TEST_P(Executables, BadTextIsRefusedWithTheCompilersWords) {
  auto client = open();
  try {
    Executable::compile(*client, "module { nonsense }", {.device_ids = {client->devices()[0].id}, .flags = {}});
    FAIL() << "compiled nonsense";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::device);
    EXPECT_NE(e.message().find("PJRT_Client_Compile"), std::string::npos) << e.message();
  }
}

TEST_P(Executables, CostAnalysisCountsADot) {
  auto client = open();
  constexpr const char* text = R"(module @dot {
  func.func public @main(%x: tensor<64x128xf32>, %y: tensor<128x32xf32>) -> tensor<64x32xf32> {
    %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<64x128xf32>, tensor<128x32xf32>) -> tensor<64x32xf32>
    return %z : tensor<64x32xf32>
  }
})";
  auto exe = Executable::compile(*client, text, {.device_ids = {client->devices()[0].id}, .flags = {}});
  if (!exe.compiled().flops()) GTEST_SKIP() << "this plugin does not implement cost analysis";
  EXPECT_NEAR(*exe.compiled().flops(), 2.0 * 64 * 128 * 32, 1.0);
}

TEST(CompileOptions, SameOptionsSameBytes) {
  const CompileOptions a{.device_ids = {0, 1}, .flags = {{"a", "1"}, {"b", "2"}, {"c", "3"}}};
  CompileOptions b = a;
  EXPECT_EQ(a.serialize(), b.serialize());
  b.device_ids = {1, 0};
  EXPECT_NE(a.serialize(), b.serialize());
}

TEST(Executable, NamesThePluginThatThrows) {
  auto client = Client::open("cpu", {}, MD_TEST_PLUGINS "/throwing.so");
  auto exe = Executable::compile(*client, kAddOne, {.device_ids = {client->devices()[0].id}, .flags = {}});
  Buffer x = counting(*client);
  try {
    exe.run({{&x}});
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::device);
    EXPECT_NE(e.message().find("throwing.so' threw 'hash_map::at' while it ran"), std::string::npos) << e.message();
  }
}

}  // namespace
}  // namespace md::pjrt
