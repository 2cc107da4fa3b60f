// Eight virtual CPU devices: arrays are split and reassembled, and programs over them give the same numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/runtime/runtime.h"
#include "maxdiffusion/runtime/test_ops.h"

namespace md {
namespace {

Devices eight(int64_t data, int64_t fsdp, int64_t tensor) {
  MeshConfig config;
  config.ici_data_parallelism = data;
  config.ici_fsdp_parallelism = fsdp;
  config.ici_tensor_parallelism = tensor;
  return Devices::open("cpu", 8, config);
}

bool same(const HostArray& a, const HostArray& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

TEST(Sharded, PutAndGetAreInverse) {
  const Devices devices = eight(2, 2, 2);
  ASSERT_EQ(devices.mesh().devices(), 8);
  EXPECT_EQ(devices.local().size(), 8u);
  const HostArray a = counting({8, 12, 16});
  const std::vector<Sharding> shardings = {{},
                                           {{{"data"}}},
                                           {{{}, {"fsdp"}}},
                                           {{{}, {}, {"tensor"}}},
                                           {{{"data", "fsdp", "tensor"}}},
                                           {{{"data"}, {"fsdp"}, {"tensor"}}},
                                           {{{"tensor"}, {}, {"fsdp", "data"}}}};
  for (const Sharding& s : shardings) {
    const Array put = devices.put(a, s);
    ASSERT_EQ(put.shards().size(), 8u);
    EXPECT_TRUE(same(devices.get(put), a));
    int64_t shards = 1;
    for (const auto& axes : s.dims)
      for (const auto& axis : axes) shards *= devices.mesh().size(axis);
    EXPECT_EQ(put.bytes_per_device(), static_cast<int64_t>(a.bytes()) / shards);
  }
}

TEST(Sharded, EveryElementTypeSurvives) {
  const Devices devices = eight(2, 2, 2);
  for (DType t : {DType::pred, DType::s8, DType::u16, DType::bf16, DType::f16, DType::s32, DType::f64, DType::u64}) {
    HostArray a(Shape{t, {4, 6, 10}});
    for (size_t i = 0; i < a.bytes(); ++i)
      a.mutable_data()[i] = static_cast<std::byte>(t == DType::pred ? i % 2 : i % 120);
    EXPECT_TRUE(same(devices.get(devices.put(a, {{{"data"}, {"fsdp"}, {"tensor"}}})), a)) << to_string(t);
  }
}

TEST(Sharded, ScalarsAreOnEveryDevice) {
  const Devices devices = eight(8, 1, 1);
  const Array a = devices.put(floats({}, {3}));
  EXPECT_EQ(a.shards().size(), 8u);
  EXPECT_EQ(devices.get(a).to_doubles(), std::vector<double>{3});
}

TEST(Sharded, UnevenSplitNamesTheArray) {
  const Devices devices = eight(8, 1, 1);
  try {
    devices.put(counting({12}), {{{"data"}}}, "latents");
    FAIL() << "12 was split over 8";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("latents"), std::string::npos) << e.message();
  }
}

// The shards that each of several processes would have of the eight devices.

TEST(Shards, OfAllProcessesMakeUpEachArrayOnce) {
  const Devices devices = eight(2, 2, 2);
  const HostArray a = counting({8, 12, 16});
  for (const std::vector<int>& processes :
       {std::vector<int>(8, 0), {0, 0, 0, 0, 1, 1, 1, 1}, {0, 0, 1, 1, 0, 0, 1, 1}, {3, 0, 1, 2, 0, 1, 2, 3}}) {
    for (const Sharding& sharding : std::vector<Sharding>{{},
                                                          {{{"data"}}},
                                                          {{{}, {"fsdp"}}},
                                                          {{{}, {}, {"tensor"}}},
                                                          {{{"data"}, {"fsdp"}, {"tensor"}}},
                                                          {{{"tensor"}, {}, {"fsdp", "data"}}}}) {
      ShardedArray all{a.shape(), {}};
      std::vector<Slice> slices;
      for (int process = 0; process < 4; ++process) {
        if (std::ranges::find(processes, process) == processes.end()) continue;
        const Devices mine = devices.as_process(process, processes);
        std::vector<Slice> requested;
        const Array put = mine.put(
            a.shape(),
            [&](const Slice& s) {
              requested.push_back(s);
              return ShardedArray(a).read(s);
            },
            sharding);
        EXPECT_EQ(put.shards().size(), mine.local().size());
        const ShardedArray local = fetch_shards(mine, put, Which::local).wait();
        ASSERT_EQ(local.shards.size(), requested.size());
        for (size_t i = 0; i < requested.size(); ++i) {
          EXPECT_EQ(local.shards[i].slice, requested[i]);
          EXPECT_TRUE(same(local.shards[i].values, ShardedArray(a).read(requested[i])));
        }
        if (local.complete()) {
          EXPECT_TRUE(same(mine.get(put), a));
        } else {
          EXPECT_THROW(mine.get(put), Error);
        }
        for (const Shard& p : fetch_shards(mine, put).wait().shards) {
          slices.push_back(p.slice);
          all.shards.push_back(p);
        }
      }
      EXPECT_EQ(tiling_fault(a.dims(), slices), "");
      EXPECT_TRUE(same(all.whole(), a));
    }
  }
}

TEST(Shards, ThoseOnSeveralDevicesAreOwnedByTheFirst) {
  const Devices devices = eight(2, 2, 2);
  const std::vector<int> processes = {0, 0, 0, 0, 1, 1, 1, 1};  // the two halves of data
  const Devices first = devices.as_process(0, processes), second = devices.as_process(1, processes);
  for (const Sharding& sharding : {Sharding{}, Sharding{{{"fsdp"}, {"tensor"}}}}) {
    const Array a = first.put(counting({4, 4}), sharding), b = second.put(counting({4, 4}), sharding);
    EXPECT_TRUE(fetch_shards(first, a).wait().complete());
    EXPECT_TRUE(fetch_shards(second, b).wait().shards.empty());
    EXPECT_TRUE(fetch_shards(second, b, Which::local).wait().complete());
  }
}

TEST(Shards, OfAnotherShapeAreRefused) {
  const Devices devices = eight(8, 1, 1);
  try {
    devices.put(
        {DType::f32, {16, 2}},
        [](const Slice&) {
          return counting({16, 2});
        },
        {{{"data"}}}, "latents");
    FAIL() << "the whole was taken for a shard";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("latents: [0:2,0:2] of f32[16,2] was given as f32[16,2]"), std::string::npos)
        << e.message();
  }
}

/// x [32, 64] · w [64, 48] with whole numbers, so that any order of summation gives the same bits.
// S1-38
TEST(Sharded, MatmulGivesTheSingleDeviceResult) {
  const HostArray x = counting({32, 64}, 7), w = counting({64, 48}, 5);
  const AxisRules rules = AxisRules::parse("[['rows', 'data'], ['inner', 'fsdp'], ['columns', 'tensor']]",
                                           {"data", "fsdp", "context", "tensor"});
  auto run = [&](const Devices& devices) {
    Graph g(devices.graph_options(&rules));
    Tensor a = g.input("x", x.shape(), {"rows", "inner"}), b = g.input("w", w.shape(), {"inner", "columns"});
    Tensor y = apply(kTestMatmul, {a, b});
    g.output("y", y);
    g.output("w_sum", apply(kTestAdd, {b, b}), "w");
    g.alias("w", "w_sum");
    return evaluate(devices, g, {x, w});
  };
  const Devices one = Devices::open();
  const auto expected = run(one);
  for (auto [data, fsdp, tensor] : {std::array<int64_t, 3>{8, 1, 1}, {1, 8, 1}, {1, 1, 8}, {2, 2, 2}, {4, 2, 1}}) {
    const Devices devices = eight(data, fsdp, tensor);
    const auto got = run(devices);
    EXPECT_TRUE(same(got[0], expected[0])) << devices.mesh().describe();
    EXPECT_TRUE(same(got[1], expected[1])) << devices.mesh().describe();
  }
}

// S1-14
TEST(Sharded, StateKeepsItsShardingAndItsMemory) {
  const Devices devices = eight(1, 8, 1);
  const AxisRules rules = AxisRules::parse("[['inner', 'fsdp']]", {"data", "fsdp", "context", "tensor"});
  Graph g(devices.graph_options(&rules));
  Tensor s = g.input("state", {DType::f32, {64, 16}}, {"inner", ""}), d = g.input("delta", {DType::f32, {64, 16}});
  g.output("state", apply(kTestAdd, {s, d}), "state");
  g.alias("state", "state");
  const Program p = compile(devices, g, {.jax_cache_dir = "off", .xla_flags = ""}, "step");
  EXPECT_EQ(p.input_sharding(0), p.output_sharding(0));
  EXPECT_EQ(p.memory()->aliased, 64 * 16 * 4 / 8);
  ArrayMap state, batch;
  state["state"] = devices.put(counting({64, 16}), p.input_sharding(0));
  batch["delta"] = devices.put(counting({64, 16}));
  for (int i = 0; i < 3; ++i) state = p.run(state, batch);
  EXPECT_EQ(state["state"].bytes_per_device(), 64 * 16 * 4 / 8);
  EXPECT_EQ(devices.get(state["state"]).view<float>()[1023], 4 * 1023.0f);

  Array whole = devices.put(counting({64, 16})), delta = devices.put(counting({64, 16}));
  try {
    p.run({&whole, &delta});
    FAIL() << "an array with another sharding was accepted";
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("'state' has another sharding"), std::string::npos) << e.message();
  }
}

TEST(WindowsFirst, IsTheOrderOfConvolutionWeightsAlone) {
  const LogicalAxes flat = {"conv_out", "conv_in", "window_height", "window_width"};
  EXPECT_EQ(filters_before_channels(flat, {8, 4, 3, 3}), (Axes{2, 3, 1, 0}));
  EXPECT_EQ(filters_before_channels(flat, {8, 4, 1, 1}), Axes());
  EXPECT_EQ(filters_before_channels({"", "conv_out", "", "window_frames", "window_height", "window_width"},
                                    {2, 8, 4, 3, 1, 1}),
            (Axes{0, 3, 4, 5, 2, 1}));
  EXPECT_EQ(filters_before_channels({"embed", "heads"}, {4, 4}), Axes());
}

// As on a TPU: state whose axes have another order in memory is put, updated, donated and fetched.
TEST(Sharded, StateInAnotherLayoutIsEqual) {
  const AxisRules rules = AxisRules::parse("[['conv_out', 'fsdp']]", {"data", "fsdp", "context", "tensor"});
  const Shape shape{DType::f32, {16, 3, 2, 5}};
  const HostArray start = counting(shape.dims), delta = counting(shape.dims, 7);
  for (const auto& [data, fsdp] : {std::pair<int64_t, int64_t>{1, 1}, {4, 2}, {1, 8}}) {
    const Devices devices = data * fsdp > 1 ? eight(data, fsdp, 1) : Devices::open();
    GraphOptions options = devices.graph_options(&rules);
    EXPECT_EQ(options.memory_order, nullptr);
    options.memory_order = filters_before_channels;
    Graph g(options);
    Tensor s = g.input("state", shape, {"conv_out", "conv_in", "window_height", "window_width"}),
           d = g.input("delta", shape);
    g.output("state", apply(kTestAdd, {s, d}), "state");
    g.alias("state", "state");
    const Program p = compile(devices, g, {.jax_cache_dir = "off", .xla_flags = ""}, "step");
    EXPECT_EQ(p.input_sharding(0).order, (Axes{2, 3, 1, 0}));
    EXPECT_EQ(p.input_sharding(0), p.output_sharding(0));
    EXPECT_EQ(p.memory()->aliased, shape.bytes() / fsdp);
    ArrayMap state, batch;
    place(devices, p, HostArrays{{"state", start}}, state);
    place(devices, p, HostArrays{{"delta", delta}}, batch);
    EXPECT_TRUE(same(devices.get(state["state"]), start));
    for (int i = 0; i < 2; ++i) state = p.run(state, batch);
    const HostArray end = devices.get(state["state"]);
    for (size_t i = 0; i < end.view<float>().size(); ++i)
      ASSERT_EQ(end.view<float>()[i], start.view<float>()[i] + 2 * delta.view<float>()[i]) << i;

    Array plain = devices.put(start, {p.input_sharding(0).dims}), extra = devices.put(delta);
    try {
      p.run({&plain, &extra});
      FAIL() << "an array with another layout was accepted";
    } catch (const Error& e) {
      EXPECT_NE(e.message().find("'state' has another memory layout"), std::string::npos) << e.message();
    }
  }
}

TEST(Sharded, GraphForAnotherMeshIsRefused) {
  const Devices one = Devices::open(), many = eight(8, 1, 1);
  Graph g(one.graph_options());
  g.output("out", g.input("x", {DType::f32, {3}}));
  EXPECT_THROW(compile(many, g, {.jax_cache_dir = "off", .xla_flags = ""}, "p"), Error);
}

TEST(Topology, ListsTheDevicesOfTheClient) {
  const Devices devices = eight(8, 1, 1);
  const Topology t = topology(devices.client());
  EXPECT_EQ(t.platform, "cpu");
  EXPECT_EQ(t.devices.size(), 8u);
  EXPECT_EQ(t.slices(), 1);
}

}  // namespace
}  // namespace md
