#include "maxdiffusion/ops/sharding.h"

#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/ops/random.h"
#include "tests/autodiff/gradient_check.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

/// Eight virtual CPU devices: data 2 × fsdp 2 × context 1 × tensor 2.
SharedDevices& kEight = SharedDevices::add([] {
  return Devices::open("cpu", 8, {.ici_data_parallelism = 2, .ici_fsdp_parallelism = 2, .ici_tensor_parallelism = 2});
});
const Devices& eight() { return kEight.get(); }

std::vector<HostArray> run_on(const Devices& d, const Traced& traced, const AxisRules* rules = nullptr) {
  Graph g(d.graph_options(rules));
  traced.trace(g);
  const auto program = compile(d, g, {.jax_cache_dir = "off"}, "eight_devices");
  const auto in = traced.inputs();
  std::vector<Array> arrays;
  std::vector<Array*> pointers;
  for (size_t i = 0; i < in.size(); ++i) arrays.push_back(d.put(in[i], program.input_sharding(i)));
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<HostArray> out;
  for (Array& a : program.run(pointers)) out.push_back(d.get(a));
  return out;
}

void expect_same(const Traced& per_device, const Traced& plain, double tolerance = 1e-12) {
  auto a = run_on(eight(), per_device), b = plain.run();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(to_string(a[i].shape()), to_string(b[i].shape()));
    expect_close(a[i].to_doubles(), b[i].to_doubles(), tolerance, "output " + std::to_string(i));
  }
}

using Body = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

Tensor per_device(const std::vector<Tensor>& x, const std::vector<DimAxes>& in, const DimAxes& out,
                  const std::vector<std::string>& manual, const std::function<Tensor(const std::vector<Tensor>&)>& f) {
  return manual_computation(x, in, {out}, manual,
                            [&](const std::vector<Tensor>& v) { return std::vector<Tensor>{f(v)}; })[0];
}

const std::vector<std::string> kTwo = {"data", "tensor"};

TEST(Sharding, ConstraintOnOneDeviceAddsNoNode) {
  Graph g;
  Tensor x = g.input("x", f32({4, 4}));
  EXPECT_EQ(shard_axes(x, {{"data"}, {}}), x);
  EXPECT_EQ(shard(x, {"batch", "embed"}), x);
  EXPECT_THROW(shard(x, {"batch"}), Error);
}

TEST(Barriers, AreOmittedInLoopsOnCpusOnly) {
  auto barriers = [](bool on_mesh, bool in_loop) {
    GraphOptions options;
    options.mesh_axes = {{"data", 2}, {"tensor", 4}};
    Graph g(options);
    auto barred = [](Tensor x) { return optimization_barrier({tanh(x)})[0]; };
    auto body = [&](const std::vector<Tensor>& x) {
      if (!in_loop) return barred(x[0]);
      return scan(3, x,
                  [&](ScanStep&, const std::vector<Tensor>& y) {
                    return ScanResult{{barred(y[0])}, {}};
                  })
          .carry[0];
    };
    Tensor x = g.input("x", f32({4, 8}));
    g.output("y", on_mesh ? per_device({x}, {{{"data"}, {"tensor"}}}, {{"data"}, {"tensor"}}, kTwo, body) : body({x}));
    return count(to_stablehlo(g), "stablehlo.optimization_barrier");
  };
  EXPECT_EQ(barriers(false, false), 1);
  EXPECT_EQ(barriers(true, false), 1);
  EXPECT_EQ(barriers(false, true), 0);
  EXPECT_EQ(barriers(true, true), 0);
}

// S1-38
TEST(Sharding, ConstraintKeepsValuesAndGradients) {
  const AxisRules rules = AxisRules::defaults();
  auto loss = [](Graph&, const std::vector<Tensor>& x) {
    return sum(square(shard(tanh(matmul(shard(x[0], {"batch", "embed"}), x[1])), {"batch", "heads"})));
  };
  const Traced traced = with_gradients({f64({8, 4}), f64({4, 8})}, loss);
  auto a = run_on(eight(), traced, &rules), b = traced.run();
  for (size_t i = 0; i < a.size(); ++i) expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-12, "output");
  Graph g(eight().graph_options(&rules));
  traced.trace(g);
  EXPECT_EQ(count(to_stablehlo(g), "sdy.sharding_constraint"), 4);
  Tensor x = g.input("another", f32({4}));
  try {
    PathScope scope(g, "mid.block");
    shard(x, {"no_such_name"});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("no_such_name"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("mid.block"), std::string::npos) << e.what();
  }
}

TEST(Sharding, CheckpointKeepsValuesAndGradients) {
  const AxisRules rules = AxisRules::defaults();
  auto loss = [](Graph&, const std::vector<Tensor>& x) {
    Tensor h = shard(x[0], {"batch", "embed"});
    auto block = [](const std::vector<Tensor>& v) {
      return std::vector<Tensor>{v[0] + matmul(shard(tanh(matmul(v[0], v[1])), {"batch", "mlp"}), v[2])};
    };
    for (int i = 0; i < 3; ++i) h = checkpoint(remat_policy("FULL"), block, {h, x[1], x[2]})[0];
    return sum(square(h));
  };
  const Traced traced = with_gradients({f64({8, 4}), f64({4, 8}), f64({8, 4})}, loss);
  auto a = run_on(eight(), traced, &rules), b = traced.run();
  for (size_t i = 0; i < a.size(); ++i) expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-12, "output");
}

TEST(Sharding, ScanOverSplitWeightsKeepsValuesAndGradients) {
  const AxisRules rules = AxisRules::defaults();
  auto loss = [](Graph&, const std::vector<Tensor>& x) {
    Tensor w = shard_axes(x[1], {{}, {"fsdp"}, {"tensor"}});  // [layers, in, out]
    auto body = [](const std::vector<Tensor>& v) {
      return std::vector<Tensor>{v[0] + tanh(matmul(v[0], v[1]) * v[2])};
    };
    auto r = scan(3, {shard(x[0], {"batch", "embed"})}, [&](ScanStep& step, const std::vector<Tensor>& c) {
      return ScanResult{checkpoint(remat_policy("FULL"), body, {c[0], step.slice(w), x[2]}), {sum(c[0], {1})}};
    });
    return sum(square(r.carry[0])) + sum(sin(r.stacked[0]));
  };
  const Traced traced = with_gradients({f64({8, 4}), f64({3, 4, 4}), f64({4})}, loss);
  auto a = run_on(eight(), traced, &rules), b = traced.run();
  for (size_t i = 0; i < a.size(); ++i) expect_close(a[i].to_doubles(), b[i].to_doubles(), 1e-12, "output");
}

TEST(Sharding, RandomBitsDoNotDependOnIt) {
  const Traced traced{{}, [](Graph& g, const std::vector<Tensor>&) {
                        Rng r = Rng::seed(g, 7).for_("noise");
                        return std::vector<Tensor>{
                            shard_axes(random_bits(r, {8, 6, 4}), {{"data", "fsdp"}, {}, {"tensor"}}),
                            shard_axes(random_bits(r, {8, 6, 4}), {{}, {"tensor"}, {"fsdp"}})};
                      }};
  auto a = run_on(eight(), traced), b = traced.run();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].to_doubles(), b[i].to_doubles());
}

TEST(Collectives, AllReduceSumsOverTheAxis) {
  const std::vector<Shape> s = {f64({4, 6})};
  expect_same({s,
               [](Graph&, const std::vector<Tensor>& x) {
                 return std::vector<Tensor>{per_device(x, {{{"data"}, {"tensor"}}}, {{}, {"tensor"}}, kTwo,
                                                       [](auto& v) { return all_reduce_sum(v[0], {"data"}); })};
               }},
              {s, [](Graph&, const std::vector<Tensor>& x) {
                 return std::vector<Tensor>{slice_axis(x[0], 0, 0, 2) + slice_axis(x[0], 0, 2, 4)};
               }});
}

TEST(Collectives, RingSum) {  // each device passes its shard on until every device has received all
  const std::vector<Shape> s = {f64({4, 3})};
  expect_same({s,
               [](Graph&, const std::vector<Tensor>& x) {
                 return std::vector<Tensor>{per_device(x, {{{"data"}}}, {{}}, {"data"}, [](auto& v) {
                   Tensor total = v[0], part = v[0];
                   for (int i = 1; i < 2; ++i) {
                     part = collective_permute(part, "data", 1);
                     total = total + part;
                   }
                   return total;
                 })};
               }},
              {s, [](Graph&, const std::vector<Tensor>& x) {
                 return std::vector<Tensor>{slice_axis(x[0], 0, 0, 2) + slice_axis(x[0], 0, 2, 4)};
               }});
}

TEST(Collectives, GatherScatterAndIndex) {
  const std::vector<Shape> s = {f64({4, 6})};
  expect_same(
      {s,
       [](Graph&, const std::vector<Tensor>& x) {
         return std::vector<Tensor>{
             per_device(x, {{{"data"}, {"tensor"}}}, {{"data"}, {}}, kTwo,
                        [](auto& v) { return all_gather(v[0], "tensor", 1); }),
             per_device(x, {{{"data"}, {}}}, {{"data"}, {"tensor"}}, kTwo,
                        [](auto& v) { return reduce_scatter(v[0], "tensor", 1); }),
             per_device(x, {{{"data"}, {"tensor"}}}, {{"data"}, {"tensor"}}, kTwo,
                        [](auto& v) {
                          Graph& g = v[0].graph();
                          return v[0] + cast(axis_index(g, "data") * 10.0 + axis_index(g, "tensor"), DType::f64);
                        }),
             per_device(x, {{{"data"}, {}}}, {{}, {"data"}}, kTwo,
                        [](auto& v) { return all_to_all(v[0], "data", 1, 0); })};
       }},
      {s, [](Graph& g, const std::vector<Tensor>& x) {
         auto half = [&](int64_t dim) {
           return cast(gt(iota(g, {DType::s32, {4, 6}}, dim), constant(g, dim ? 2 : 1, DType::s32)), DType::f64);
         };
         return std::vector<Tensor>{x[0], x[0] * 2.0, x[0] + half(0) * 10.0 + half(1), x[0]};
       }});
}

// The loss computed per device with every collective, compared with the same loss written for whole arrays.
TEST(Collectives, Gradients) {
  const std::vector<Shape> s = {f64({4, 6}), f64({6}), f64({6, 6})};
  auto manual = [](Graph&, const std::vector<Tensor>& x) {
    Tensor y = per_device(x, {{{"data"}, {"tensor"}}, {}, {{}, {"tensor"}}}, {{"data"}, {"tensor"}}, kTwo, [](auto& v) {
      Tensor whole = all_gather(v[0], "tensor", 1) * v[1];            // [2, 6]
      Tensor z = tanh(matmul(whole, v[2]));                           // [2, 3] of [4, 6]
      Tensor mean_row = all_reduce_sum(sum(z, {0}, true), {"data"});  // [1, 3] of [1, 6]
      Tensor swapped = collective_permute(z, "data", 1);
      Tensor spread = reduce_scatter(whole, "tensor", 1) * 0.5;  // both devices hold `whole`; each keeps its half
      Tensor turned = all_to_all(all_to_all(z, "tensor", 0, 1), "tensor", 1, 0);
      return z * mean_row + sin(swapped) * spread + turned;
    });
    return sum(square(y));
  };
  auto plain = [](Graph&, const std::vector<Tensor>& x) {
    Tensor whole = x[0] * x[1];
    Tensor z = tanh(matmul(whole, x[2]));
    Tensor swapped = concatenate({slice_axis(z, 0, 2, 4), slice_axis(z, 0, 0, 2)}, 0);
    return sum(square(z * sum(z, {0}, true) + sin(swapped) * whole + z));
  };
  expect_same(with_gradients(s, manual), with_gradients(s, plain), 1e-11);
}

TEST(Collectives, GradientsThroughReplicatedResultsAndLoops) {
  const std::vector<Shape> s = {f64({4, 6}), f64({6})};
  auto manual = [](Graph&, const std::vector<Tensor>& x) {
    Tensor y = per_device(x, {{{"tensor", "data"}}, {}}, {}, kTwo, [](auto& v) {
      auto r = scan(3, {v[0]}, [&](ScanStep&, const std::vector<Tensor>& c) {
        return ScanResult{{tanh(collective_permute(c[0], "tensor", 1) * v[1])}, {}};
      });
      return all_reduce_sum(sum(square(r.carry[0]) * v[1], {0}), {"data", "tensor"});
    });
    return sum(sin(y));
  };
  auto plain = [](Graph&, const std::vector<Tensor>& x) {
    Tensor h = x[0];
    for (int i = 0; i < 3; ++i) h = tanh(concatenate({slice_axis(h, 0, 2, 4), slice_axis(h, 0, 0, 2)}, 0) * x[1]);
    return sum(sin(sum(square(h) * x[1], {0})));
  };
  expect_same(with_gradients(s, manual), with_gradients(s, plain), 1e-11);
}

TEST(ManualComputation, OnOneDeviceIsItsBody) {
  Graph g;
  Tensor x = g.input("x", f64({4}));
  Tensor y =
      per_device({x}, {{{"data"}}}, {{"data"}}, {"data"}, [](auto& v) { return all_reduce_sum(v[0], {"data"}); });
  EXPECT_EQ(x, y);
}

TEST(ManualComputation, NamesAValueFromOutside) {
  Graph g(eight().graph_options());
  Tensor x = g.input("x", f64({4})), w = g.input("w", f64({2}));
  try {
    per_device({x}, {{{"data"}}}, {{"data"}}, {"data"}, [&](auto& v) { return v[0] * w; });
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(e.message().find("pass it as an input"), std::string::npos) << e.what();
  }
  Tensor odd = g.input("odd", f64({3}));
  EXPECT_THROW(per_device({odd}, {{{"data"}}}, {{"data"}}, {"data"}, [](auto& v) { return v[0]; }), Error);
}

}  // namespace
}  // namespace md
