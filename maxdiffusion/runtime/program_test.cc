// The chain graph → executable → device arrays, with the real plugin and one device.
#include <gtest/gtest.h>
#include <xla/ffi/api/ffi.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/test_error.h"
#include "maxdiffusion/pjrt/ffi.h"
#include "maxdiffusion/runtime/memory.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/runtime/test_ops.h"

namespace md {
namespace {

const CompileConfig kNoCache{.jax_cache_dir = "off", .xla_flags = ""};

std::atomic<bool> gate_open = false;

xla::ffi::Error gate(xla::ffi::Buffer<xla::ffi::F32> x, xla::ffi::ResultBuffer<xla::ffi::F32> y) {
  while (!gate_open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::copy_n(x.typed_data(), x.element_count(), y->typed_data());
  return xla::ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(
    kGate, gate, xla::ffi::Ffi::Bind().Arg<xla::ffi::Buffer<xla::ffi::F32>>().Ret<xla::ffi::Buffer<xla::ffi::F32>>());

xla::ffi::Error broken(xla::ffi::Buffer<xla::ffi::F32>, xla::ffi::ResultBuffer<xla::ffi::F32>) {
  return xla::ffi::Error::Internal("the fuse has blown");
}
XLA_FFI_DEFINE_HANDLER(
    kBroken, broken,
    xla::ffi::Ffi::Bind().Arg<xla::ffi::Buffer<xla::ffi::F32>>().Ret<xla::ffi::Buffer<xla::ffi::F32>>());

TEST(Program, EvaluateRunsAGraphOnTheDefaultPlugin) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {3}}), y = g.input("y", {DType::f32, {3}});
  g.output("sum", apply(kTestAdd, {x, y}));
  auto out = evaluate(devices, g, {floats({3}, {1, 2, 3}), floats({3}, {10, 20, 30})});
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].to_doubles(), (std::vector<double>{11, 22, 33}));
}

TEST(Program, KnowsItsInputsOutputsAndPlan) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {64, 32}}), y = g.input("y", {DType::f32, {32, 16}});
  g.output("product", apply(kTestMatmul, {x, y}));
  const Program p = compile(devices, g, kNoCache, "a name with spaces/and slashes");
  EXPECT_EQ(p.input_names(), (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(p.output_names(), (std::vector<std::string>{"product"}));
  EXPECT_EQ(p.input_shape(1), (Shape{DType::f32, {32, 16}}));
  ASSERT_TRUE(p.memory());
  EXPECT_EQ(p.memory()->arguments, (64 * 32 + 32 * 16) * 4);
  EXPECT_EQ(p.memory()->outputs, 64 * 16 * 4);
  EXPECT_EQ(p.memory()->aliased, 0);
  EXPECT_FALSE(p.report().from_cache);
  EXPECT_GT(p.report().compile_seconds, 0);
  EXPECT_GT(p.report().program_bytes, 100);
}

TEST(Program, DonationReusesMemoryAndEmptiesTheArray) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor state = g.input("state", {DType::f32, {1000}}), step = g.input("step", {DType::f32, {1000}});
  g.output("state", apply(kTestAdd, {state, step}), "state");
  g.alias("state", "state");
  const Program p = compile(devices, g, kNoCache, "step");
  EXPECT_EQ(p.memory()->aliased, 4000);
  ArrayMap mine, batch;
  mine["state"] = devices.put(counting({1000}));
  batch["step"] = devices.put(counting({1000}));
  mine["state"].shards()[0].wait();
  const uintptr_t before = mine["state"].shards()[0].address();
  for (int i = 0; i < 3; ++i) {
    ArrayMap out = p.run(mine, batch);
    EXPECT_TRUE(mine.empty());
    mine = std::move(out);
  }
  EXPECT_EQ(mine["state"].shards()[0].address(), before);
  EXPECT_EQ(devices.get(mine["state"]).view<float>()[999], 4 * 999.0f);
  EXPECT_EQ(devices.get(batch["step"]).view<float>()[999], 999.0f);

  Array a = devices.put(counting({1000})), b = devices.put(counting({1000}));
  p.run({&a, &b});
  EXPECT_FALSE(a);
  EXPECT_TRUE(b);
  const Error e = error_of([&] { p.run({&a, &b}); });
  EXPECT_EQ(e.code(), Code::device);
  EXPECT_NE(e.message().find("'state' is empty"), std::string::npos) << e.message();
  EXPECT_EQ(error_of([&] { devices.get(a); }).code(), Code::device);
}

// On a CPU, state that is moved into its program is not copied, and the program writes its results in place.
TEST(Program, SolelyOwnedValuesAreNotCopied) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor state = g.input("state", {DType::f32, {1000}}), step = g.input("step", {DType::f32, {1000}});
  g.output("state", apply(kTestAdd, {state, step}), "state");
  g.alias("state", "state");
  const Program p = compile(devices, g, kNoCache, "step");
  HostArrays values = {{"state", counting({1000})}, {"step", counting({1000})}};
  auto address = [&](const char* name) { return reinterpret_cast<uintptr_t>(values.at(name).data()); };
  const uintptr_t of_state = address("state"), of_step = address("step");
  const HostArray held = values.at("step");
  ArrayMap mine, batch;
  place(devices, p, std::move(values), mine);
  batch.insert(mine.extract("step"));
  EXPECT_EQ(mine["state"].shards()[0].address(), of_state);
  EXPECT_NE(batch["step"].shards()[0].address(), of_step) << "somebody else reads it";
  for (int i = 0; i < 3; ++i) {
    ArrayMap out = p.run(mine, batch);
    mine = std::move(out);
  }
  EXPECT_EQ(mine["state"].shards()[0].address(), of_state);
  EXPECT_EQ(devices.get(mine["state"]).view<float>()[999], 4 * 999.0f);
  EXPECT_EQ(held.view<float>()[999], 999.0f);
}

TEST(Program, RefusesWrongInputsByName) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor x = g.input("weight", {DType::f32, {3}}), y = g.input("bias", {DType::f32, {3}});
  g.output("out", apply(kTestAdd, {x, y}));
  g.alias("weight", "out");
  const Program p = compile(devices, g, kNoCache, "wrong");
  Array good = devices.put(floats({3}, {1, 2, 3})), bad = devices.put(floats({2}, {1, 2}));
  Error e = error_of([&] { p.run({&good, &bad}); });
  EXPECT_EQ(e.code(), Code::device);
  for (const char* word : {"'bias'", "f32[2]", "f32[3]", "'wrong'"})
    EXPECT_NE(e.message().find(word), std::string::npos) << e.message();
  EXPECT_TRUE(good) << "a refused run takes nothing";
  EXPECT_EQ(error_of([&] { p.run({&good}); }).code(), Code::device);

  ArrayMap donated, retained;
  retained["weight"] = devices.put(floats({3}, {1, 2, 3}));
  e = error_of([&] { p.run(donated, retained); });
  EXPECT_NE(e.message().find("among the donated"), std::string::npos) << e.message();
  donated = std::move(retained);
  e = error_of([&] { p.run(donated, {}); });
  EXPECT_NE(e.message().find("'bias' is not given"), std::string::npos) << e.message();
  EXPECT_TRUE(donated["weight"]);
}

TEST(Program, RefusedTextIsSavedAndNamed) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  g.output("out", apply(kTestNonsense, {g.input("x", {DType::f32, {3}})}));
  const Error e = error_of([&] { compile(devices, g, kNoCache, "nonsense"); });
  EXPECT_EQ(e.code(), Code::invalid_graph);
  EXPECT_NE(e.message().find("no_such_statement"), std::string::npos) << e.message();
  ASSERT_EQ(e.notes().size(), 1u);
  const std::string path = e.notes()[0].substr(e.notes()[0].find('/'));
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_NE(text.find("module @nonsense"), std::string::npos);
  std::filesystem::remove(path);
}

TEST(Program, RefusesFlagsItDoesNotUnderstand) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  g.output("out", g.input("x", {DType::f32, {3}}));
  EXPECT_EQ(error_of([&] { compile(devices, g, {.jax_cache_dir = "off", .xla_flags = "xla=1"}, "f"); }).code(),
            Code::invalid_config);
  EXPECT_NO_THROW(
      compile(devices, g, {.jax_cache_dir = "off", .xla_flags = "--xla_backend_optimization_level=1"}, "f"));
  CompileConfig lean = kNoCache;
  lean.minimize_memory = true;
  EXPECT_NO_THROW(compile(devices, g, lean, "f")) << "a flag of ours that an older compiler does not know is left out";
  const Error unknown =
      error_of([&] { compile(devices, g, {.jax_cache_dir = "off", .xla_flags = "--xla_no_such_flag=1"}, "f"); });
  EXPECT_NE(std::string(unknown.what()).find("xla_no_such_flag"), std::string::npos) << unknown.what();
}

TEST(Program, RunAndFetchReturnBeforeTheDeviceIsDone) {
  const Devices devices = Devices::open();
  if (!pjrt::supports_ffi_handlers(devices.client())) GTEST_SKIP() << "this plugin cannot call back";
  pjrt::register_ffi_handler(devices.client(), "md_test_gate", reinterpret_cast<void*>(kGate));
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {256, 256}});
  // The plugin runs programs with little arithmetic in the caller's thread; one product is enough to make it
  // asynchronous.
  g.output("out", apply(kTestCall, {apply(kTestMatmul, {x, x})}, std::string("md_test_gate")));
  const Program p = compile(devices, g, kNoCache, "gate");
  Array a = devices.put(counting({256, 256}, 2));
  gate_open = false;
  std::vector<Array> out = p.run({&a});
  PendingArray pending = fetch(devices, out[0]);
  EXPECT_FALSE(pending.ready());
  gate_open = true;
  EXPECT_EQ(pending.wait().view<float>()[1], 128.0f);  // rows and columns of 0, 1, 0, 1, …
  EXPECT_TRUE(pending.ready());
}

// Two runs in flight would each hold temporary memory.
TEST(Program, OnTheHostWaitsForItsLastRun) {
  const Devices devices = Devices::open();
  if (!pjrt::supports_ffi_handlers(devices.client())) GTEST_SKIP() << "this plugin cannot call back";
  pjrt::register_ffi_handler(devices.client(), "md_test_gate", reinterpret_cast<void*>(kGate));
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {256, 256}});
  g.output("out", apply(kTestCall, {apply(kTestMatmul, {x, x})}, std::string("md_test_gate")));
  const Program p = compile(devices, g, kNoCache, "gate");
  Array a = devices.put(counting({256, 256}, 2));
  gate_open = false;
  std::vector<Array> first = p.run({&a});
  const PendingArray pending = fetch(devices, first[0]);
  EXPECT_FALSE(pending.ready());
  std::jthread opens([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    gate_open = true;
  });
  std::vector<Array> second = p.run({&a});
  EXPECT_TRUE(gate_open);
  EXPECT_TRUE(first[0].shards()[0].ready().ready());
  opens.join();
}

TEST(Program, FetchMayBeForgotten) {
  const Devices devices = Devices::open();
  if (!pjrt::supports_ffi_handlers(devices.client())) GTEST_SKIP() << "this plugin cannot call back";
  pjrt::register_ffi_handler(devices.client(), "md_test_gate", reinterpret_cast<void*>(kGate));
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {256, 256}});
  g.output("out", apply(kTestCall, {apply(kTestMatmul, {x, x})}, std::string("md_test_gate")));
  const Program p = compile(devices, g, kNoCache, "gate");
  Array a = devices.put(counting({256, 256}, 2));
  gate_open = false;
  std::vector<Array> out = p.run({&a});
  { PendingArray forgotten = fetch(devices, out[0]); }
  out.clear();
  gate_open = true;
  EXPECT_EQ(devices.get(p.run({&a})[0]).view<float>()[1], 128.0f);
}

TEST(Program, DevicesMayGoWhileWorkIsUnderWay) {
  for (int round = 0; round < 3; ++round) {
    const Devices devices = Devices::open();
    Graph g(devices.graph_options());
    Tensor x = g.input("x", {DType::f32, {512, 512}}), y = g.input("y", {DType::f32, {512, 512}});
    g.output("x", apply(kTestMatmul, {x, y}), "x");
    g.alias("x", "x");
    const Program p = compile(devices, g, kNoCache, "p");
    ArrayMap state, batch;
    state["x"] = devices.put(counting({512, 512}, 3));
    batch["y"] = devices.put(counting({512, 512}, 2));
    for (int i = 0; i < 30; ++i) {
      state = p.run(state, batch);
      fetch(devices, state["x"]);
    }
  }  // none of the results is waited for
}

TEST(Program, FetchedArrayMayBeDonatedBeforeTheCopyIsDone) {
  const Devices devices = Devices::open();
  Graph g(devices.graph_options());
  Tensor x = g.input("x", {DType::f32, {512, 512}}), y = g.input("y", {DType::f32, {512, 512}});
  g.output("x", apply(kTestAdd, {x, y}), "x");
  g.alias("x", "x");
  const Program p = compile(devices, g, kNoCache, "p");
  HostArray one(Shape{DType::f32, {512, 512}});
  for (float& v : one.mutable_view<float>()) v = 1;
  ArrayMap state, batch;
  state["x"] = devices.put(one);
  batch["y"] = devices.put(one);
  std::vector<PendingArray> pending;
  for (int i = 0; i < 100; ++i) {
    state = p.run(state, batch);
    pending.push_back(fetch(devices, state["x"]));
  }
  for (int i = 0; i < 100; ++i) {
    const HostArray a = pending[static_cast<size_t>(i)].wait();
    for (float v : a.view<float>()) ASSERT_EQ(v, static_cast<float>(i + 2)) << "step " << i;
  }
}

TEST(Program, RuntimeErrorIsThrownAtTheRead) {
  const Devices devices = Devices::open();
  if (!pjrt::supports_ffi_handlers(devices.client())) GTEST_SKIP() << "this plugin cannot call back";
  pjrt::register_ffi_handler(devices.client(), "md_test_broken", reinterpret_cast<void*>(kBroken));
  Graph g(devices.graph_options());
  g.output("out", apply(kTestCall, {g.input("x", {DType::f32, {3}})}, std::string("md_test_broken")));
  const Program p = compile(devices, g, kNoCache, "broken");
  Array a = devices.put(floats({3}, {1, 2, 3}));
  const Error e = error_of([&] { devices.get(p.run({&a})[0]); });
  EXPECT_EQ(e.code(), Code::device);
  EXPECT_NE(e.message().find("the fuse has blown"), std::string::npos) << e.message();
}

TEST(Memory, ResidentBytesGrowWithWhatIsHeld) {
  const Devices devices = Devices::open();
  const MemoryUse before = memory_use(devices);
  HostArray big = counting({64 << 20});
  const MemoryUse after = memory_use(devices);
  EXPECT_GT(before.host, 0);
  EXPECT_GE(after.host - before.host, int64_t{200} << 20);
}

}  // namespace
}  // namespace md
