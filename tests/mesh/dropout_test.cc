// Dropout layers: the kept fraction, independent masks, and the same masks when recomputed and on every mesh.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/nn/layer_keys.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/one_device.h"

namespace md {
namespace {

using Build = std::function<std::vector<Tensor>(const Scope&)>;

/// A graph with parameters below "model", and random numbers of `seed` unless that is 0.
struct Traced {
  Traced(const ScopeOptions& options, uint64_t seed, const Build& build, GraphOptions graph_options = {})
      : graph(std::move(graph_options)) {
    Scope s(graph, params, "model", options);
    if (seed != 0) s = s.with_random(Rng::seed(graph, seed));
    size_t i = 0;
    for (Tensor t : build(s)) graph.output(std::to_string(i++), t);
  }
  std::vector<std::vector<double>> run(const Devices& devices = one_device()) const {
    std::vector<HostArray> in;
    for (const GraphInput& input : graph.inputs()) in.push_back(initial_value(*params.find(input.name), 3));
    std::vector<std::vector<double>> out;
    for (const HostArray& a : evaluate(devices, graph, in)) out.push_back(a.to_doubles());
    return out;
  }
  ParamTable params;
  Graph graph;
};

Tensor ones(const Scope& s, Dims dims) { return full(s.graph(), 1, {DType::f32, std::move(dims)}); }

// S2-45
TEST(Dropout, KeepsItsShareScaledAndDropsTheRest) {
  const double p = 0.3;
  const auto out = Traced({.dropout = p}, 5, [](const Scope& s) -> std::vector<Tensor> {
                     return {nn::dropout(s / "a", ones(s, {64, 1000})), nn::dropout(s / "b", ones(s, {64, 1000})),
                             nn::dropout(s / "a", ones(s, {64, 1000}))};
                   }).run();
  double nonzero = 0, common = 0;
  for (size_t i = 0; i < out[0].size(); ++i) {
    if (out[0][i] != 0) {
      EXPECT_FLOAT_EQ(out[0][i], 1 / (1 - p));
    }
    nonzero += out[0][i] != 0;
    common += out[0][i] != 0 && out[1][i] != 0;
  }
  const double n = 64000;  // tolerance: four deviations each
  EXPECT_NEAR(nonzero / n, 1 - p, 4 * std::sqrt(p * (1 - p) / n));
  EXPECT_NEAR(common / n, (1 - p) * (1 - p), 0.008);  // layers drop independently
  EXPECT_EQ(out[0], out[2]);                          // depends only on path and step
}

TEST(Dropout, IsOffWithoutRandomNumbersAndAtZero) {
  auto text = [](double p, uint64_t seed) {
    return to_stablehlo(Traced({.dropout = p}, seed, [](const Scope& s) -> std::vector<Tensor> {
                          return {nn::dropout(s, s.param("x", {4}, {""}, init::ones()))};
                        }).graph);
  };
  EXPECT_EQ(text(0.5, 0), text(0, 0));
  EXPECT_EQ(text(0, 7), text(0, 0));
  EXPECT_NE(text(0.5, 7), text(0, 0));
}

TEST(Dropout, IsAProbabilityBelowOne) {
  for (double p : {-0.1, 1.0, std::nan("")}) try {
      LayerKeys keys;
      keys.dropout = p;
      scope_options(keys);
      ADD_FAILURE() << p;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Code::invalid_config);
      EXPECT_NE(std::string(e.what()).find("dropout is"), std::string::npos) << e.what();
    }
}

TEST(Dropout, EveryLayerOfALoopHasAMaskOfItsOwn) {
  constexpr int kLayers = 3;
  for (bool scan : {false, true}) {
    // Each layer appends one decimal digit to the carry.
    const auto digits =
        Traced({.scan_layers = scan, .dropout = 0.5}, 5, [](const Scope& s) -> std::vector<Tensor> {
          return {nn::repeat(s / "blocks", kLayers, ones(s, {1, 2000}) * 0.0, [](const Scope& b, Tensor x) {
            return x * 10.0 + nn::dropout(b / "drop", ones(b, x.dims()) * 0.5);
          })};
        }).run()[0];
    double nonzero[kLayers] = {}, different[kLayers] = {};
    for (double v : digits) {
      const auto number = std::lround(v);
      ASSERT_NEAR(v, static_cast<double>(number), 1e-3);
      const bool bits[kLayers] = {number % 10 == 1, number / 10 % 10 == 1, number / 100 == 1};
      for (int i = 0; i < kLayers; ++i) nonzero[i] += bits[i], different[i] += bits[i] != bits[(i + 1) % kLayers];
    }
    for (int i = 0; i < kLayers; ++i) {
      EXPECT_NEAR(nonzero[i] / 2000, 0.5, 0.05) << scan << i;
      EXPECT_NEAR(different[i] / 2000, 0.5, 0.05) << scan << i;
    }
  }
}

/// The mean square of three blocks' output, and its gradients with respect to their weights.
std::vector<Tensor> loss_and_gradients(const Scope& s) {
  std::vector<Tensor> weights;
  const Scope seen = s.with_source([&](const Scope& below, Param p) {
    weights.push_back(below.resolve(std::move(p)));
    return weights.back();
  });
  const Tensor x = sin(reshape(iota(s.graph(), {DType::f32, {128}}, 0), {8, 16}));
  const Tensor y = nn::repeat(seen / "blocks", 3, x, [](const Scope& b, Tensor h) {
    return h + nn::dropout(b / "drop", tanh(nn::linear(b / "linear", h, {.out = 16, .bias = false})));
  });
  std::vector<Tensor> out = {mean(square(y))};
  for (Tensor t : grad(out[0], weights)) out.push_back(t);
  return out;
}

TEST(Dropout, IsTheSameWhenRecomputed) {
  for (bool scan : {false, true}) {
    auto run = [scan](const char* remat, double p) {
      return Traced({.remat = remat, .scan_layers = scan, .dropout = p}, 9, loss_and_gradients).run();
    };
    const auto stored = run("NONE", 0.25), again = run("FULL", 0.25);
    EXPECT_NE(stored[0], run("NONE", 0)[0]);
    ASSERT_EQ(stored.size(), scan ? 2u : 4u);
    for (size_t k = 0; k < stored.size(); ++k) {
      double difference = 0, size = 0;
      for (size_t i = 0; i < stored[k].size(); ++i)
        difference += std::pow(again[k][i] - stored[k][i], 2), size += std::pow(stored[k][i], 2);
      EXPECT_LE(std::sqrt(difference), 1e-5 * std::sqrt(size)) << scan << ", output " << k;
    }
  }
}

/// Paths at which a graph and its loop bodies apply dropout.
std::set<std::string> layers_that_drop(const Graph& g) {
  std::set<std::string> paths;
  for (const auto& n : g.nodes()) {
    if (n->name == nn::kDropout) paths.insert(*n->path);
    for (const auto& body : n->bodies) paths.merge(layers_that_drop(*body));
  }
  return paths;
}

TEST(Dropout, IsWhereTheModelsHaveIt) {
  const WanTransformerConfig wan{.num_attention_heads = 2,
                                 .attention_head_dim = 12,
                                 .in_channels = 4,
                                 .out_channels = 4,
                                 .text_dim = 8,
                                 .freq_dim = 8,
                                 .ffn_dim = 16,
                                 .num_layers = 2};
  auto traced = [&](bool scan) {
    return layers_that_drop(Traced({.scan_layers = scan, .dropout = 0.1}, 1, [&](const Scope& s) {
                              trace_wan_transformer(s, wan);
                              return std::vector<Tensor>();
                            }).graph);
  };
  EXPECT_EQ(traced(true),
            (std::set<std::string>{"blocks.*.attn1.to_out.1", "blocks.*.attn2.to_out.1", "blocks.*.ffn.net.1"}));
  EXPECT_EQ(traced(false),
            (std::set<std::string>{"blocks.0.attn1.to_out.1", "blocks.0.attn2.to_out.1", "blocks.0.ffn.net.1",
                                   "blocks.1.attn1.to_out.1", "blocks.1.attn2.to_out.1", "blocks.1.ffn.net.1"}));
  const UNetConfig unet = UNetConfig::from_json(parse_json(R"({
    "in_channels": 4, "out_channels": 4, "sample_size": 8, "block_out_channels": [8], "layers_per_block": 1,
    "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "mid_block_type": null,
    "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 2})"));
  EXPECT_EQ(layers_that_drop(Traced({.dropout = 0.1}, 1,
                                    [&](const Scope& s) {
                                      unet2d(s, unet, smallest_unet_inputs(s.graph(), unet));
                                      return std::vector<Tensor>();
                                    })
                                 .graph),
            (std::set<std::string>{"down_blocks.0.resnets.0.dropout", "up_blocks.0.resnets.0.dropout",
                                   "up_blocks.0.resnets.1.dropout"}));
}

// S2-45
TEST(Dropout, IsTheSameOnEveryMesh) {
  const Build build = [](const Scope& s) -> std::vector<Tensor> {
    const Tensor x = s.param("x", {8, 6, 16}, {axis::kBatch, "", axis::kHeads}, init::normal(1));
    return {nn::dropout(s / "drop", x * 2.0)};
  };
  const ScopeOptions options{.dropout = 0.4};
  MeshConfig mesh;
  mesh.ici_data_parallelism = 2, mesh.ici_fsdp_parallelism = 2, mesh.ici_tensor_parallelism = 2;
  const Devices eight = Devices::open("cpu", 8, mesh);
  const AxisRules rules = AxisRules::defaults();
  const Traced split(options, 4, build, eight.graph_options(&rules));
  std::set<std::string> axes;
  for (const auto& dim : split.graph.inputs()[0].sharding) axes.insert(dim.begin(), dim.end());
  EXPECT_GE(axes.size(), 2u);
  EXPECT_EQ(split.run(eight), Traced(options, 4, build).run());
}

}  // namespace
}  // namespace md
