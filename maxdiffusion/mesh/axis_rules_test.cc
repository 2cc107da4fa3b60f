#include "maxdiffusion/mesh/axis_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"

namespace md {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Axes = std::vector<std::string>;
using Spec = std::vector<Axes>;

const Axes kMesh = {"data", "fsdp", "context", "tensor"};

Mesh mesh(int64_t data, int64_t fsdp, int64_t context, int64_t tensor) {
  Topology t{.platform = "cpu", .device_kind = "cpu", .devices = {}};
  for (int i = 0; i < data * fsdp * context * tensor; ++i) t.devices.push_back({.id = i, .coords = {}});
  MeshConfig c;
  c.ici_data_parallelism = data;
  c.ici_fsdp_parallelism = fsdp;
  c.ici_context_parallelism = context;
  c.ici_tensor_parallelism = tensor;
  return Mesh::make(c, t);
}

template <class F>
std::string refusal(F f, Code code) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// S1-39
TEST(AxisRules, ReadsYamlAndPythonAlike) {
  for (const char* text : {"[['batch', 'data'], ['embed', ['fsdp', 'tensor']], ['norm', null]]",
                           "[[batch, data], [embed, [fsdp, tensor]], [norm, ~]]",
                           "(('batch', 'data'), ('embed', ('fsdp', 'tensor')), ('norm', None),)",
                           "- ['batch', 'data']\n- ['embed', ['fsdp', 'tensor']]\n- ['norm', null]\n"}) {
    const auto rules = AxisRules::parse(text, kMesh).rules();
    ASSERT_EQ(rules.size(), 3u) << text;
    EXPECT_EQ(rules[0].logical, "batch");
    EXPECT_THAT(rules[0].mesh, ElementsAre("data"));
    EXPECT_THAT(rules[1].mesh, ElementsAre("fsdp", "tensor"));
    EXPECT_TRUE(rules[2].mesh.empty());
  }
}

TEST(AxisRules, RefusesOtherForms) {
  auto parse = [](const char* text) { return refusal([&] { AxisRules::parse(text, kMesh); }, Code::invalid_config); };
  EXPECT_THAT(parse("embed"), HasSubstr("not a list"));
  EXPECT_THAT(parse("[['embed']]"), HasSubstr("entry 0 is not a pair"));
  EXPECT_THAT(parse("[['embed', {a: b}]]"), HasSubstr("'embed' maps to a mapping"));
  EXPECT_THAT(parse("[['embed', [['fsdp']]]]"), HasSubstr("nested list"));
  EXPECT_THAT(parse("[['embed', 'expert']]"), HasSubstr("unknown mesh axis 'expert'; mesh_axes are data, fsdp"));
  EXPECT_THAT(parse("[['embed', ['fsdp', 'fsdp']]]"), HasSubstr("'fsdp' twice"));
  EXPECT_THAT(parse("[['embed', 'fsdp'"), HasSubstr("logical_axis_rules"));
}

// S1-36, S1-37
TEST(AxisRules, EarlierRulesWinAndAnAxisIsUsedOnce) {
  const Mesh m = mesh(1, 2, 1, 2);
  const auto rules = AxisRules::parse("[['heads', 'tensor'], ['mlp', 'tensor'], ['embed', 'fsdp']]", kMesh);
  EXPECT_EQ(rules.resolve(m, {"embed", "heads"}, {8, 8}).dims, (Spec{{"fsdp"}, {"tensor"}}));
  EXPECT_EQ(rules.resolve(m, {"mlp", "heads"}, {8, 8}).dims, (Spec{{}, {"tensor"}}));  // "heads" took tensor
  const auto of_one = AxisRules::parse("[['embed', 'fsdp'], ['embed', 'tensor']]", kMesh);
  EXPECT_EQ(of_one.resolve(m, {"embed"}, {8}).dims, (Spec{{"fsdp"}}));
}

TEST(AxisRules, ALaterRuleOfTheSameNameIsTheFallback) {
  const Mesh m = mesh(1, 2, 1, 4);
  const auto rules = AxisRules::parse("[['heads', 'tensor'], ['embed', 'tensor'], ['embed', 'fsdp']]", kMesh);
  EXPECT_EQ(rules.resolve(m, {"embed", "heads"}, {8, 8}).dims, (Spec{{"fsdp"}, {"tensor"}}));
  EXPECT_EQ(rules.resolve(m, {"embed"}, {6}).dims, (Spec{{"fsdp"}}));  // 4 does not divide 6, 2 does
}

TEST(AxisRules, NullBlocksLaterRules) {
  const auto rules = AxisRules::parse("[['embed', null], ['embed', 'fsdp']]", kMesh);
  EXPECT_EQ(rules.resolve(mesh(1, 2, 1, 1), {"embed"}, {8}).dims, (Spec{{}}));
}

TEST(AxisRules, AxesOfSizeOneAreDropped) {
  const auto rules = AxisRules::parse("[['embed', ['fsdp', 'tensor']]]", kMesh);
  EXPECT_EQ(rules.resolve(mesh(2, 1, 1, 4), {"embed"}, {8}).dims, (Spec{{"tensor"}}));
  EXPECT_TRUE(rules.resolve(Mesh::single(), {"embed"}, {7}).replicated());
}

// S1-26
TEST(AxisRules, IndivisibleDimIsReplicatedOrRefused) {
  const auto rules = AxisRules::defaults();
  const Mesh m = mesh(1, 4, 1, 2);
  EXPECT_TRUE(rules.resolve(m, {"embed"}, {6}).replicated());
  EXPECT_THAT(refusal(
                  [&] {
                    rules.resolve(m, {"heads", "embed"}, {8, 6}, true);
                  },
                  Code::invalid_config),
              HasSubstr("dim 1 ('embed') of [8,6] has size 6, which fsdp = 4 devices do not divide"));
  EXPECT_NO_THROW(rules.resolve(m, {"norm", ""}, {7, 3}, true));  // no rule splits them
}

TEST(AxisRules, KnownNamesWithoutARuleAreReplicated) {
  const auto rules = AxisRules::parse("[['embed', 'fsdp']]", kMesh);
  EXPECT_TRUE(rules.resolve(mesh(2, 2, 1, 1), {axis::kConvIn, "", axis::kHeads}, {8, 8, 8}).replicated());
}

TEST(AxisRules, UnknownAndRepeatedNamesAreRefused) {
  const auto rules = AxisRules::defaults();
  EXPECT_THAT(refusal([&] { rules.resolve(Mesh::single(), {"embde"}, {8}); }, Code::invalid_graph),
              ::testing::AllOf(HasSubstr("no rule for the logical name 'embde'"), HasSubstr("embed")));
  EXPECT_THAT(refusal(
                  [&] {
                    rules.resolve(Mesh::single(), {"embed", "embed"}, {8, 8});
                  },
                  Code::invalid_graph),
              HasSubstr("'embed' appears twice"));
  EXPECT_THAT(refusal(
                  [&] {
                    rules.resolve(Mesh::single(), {"embed"}, {8, 8});
                  },
                  Code::invalid_graph),
              HasSubstr("1 logical names [embed] for 2 dims [8,8]"));
}

TEST(AxisRules, BatchArraysAreSplitAsFinelyAsTheyDivide) {
  const auto rules = AxisRules::defaults();
  const Mesh m = mesh(2, 2, 1, 2);
  EXPECT_EQ(rules.resolve(m, {axis::kData, ""}, {8, 3}).dims, (Spec{{"data", "fsdp", "tensor"}, {}}));
  EXPECT_EQ(rules.resolve(m, {axis::kData, ""}, {4, 3}).dims, (Spec{{"data", "fsdp"}, {}}));
  EXPECT_EQ(rules.resolve(m, {axis::kData, ""}, {2, 3}).dims, (Spec{{"data"}, {}}));
  EXPECT_TRUE(rules.resolve(m, {axis::kData, ""}, {3, 3}).replicated());
  EXPECT_THAT(refusal([&] { rules.resolve(m, {axis::kData}, {3}, true); }, Code::invalid_config),
              HasSubstr("has size 3, which data = 2 devices do not divide"));
  const auto custom = AxisRules::parse("[['data_batch', 'fsdp']]", kMesh);
  EXPECT_EQ(custom.resolve(m, {axis::kData}, {8}).dims, (Spec{{"fsdp"}}));
}

const std::vector<std::string> kActivation = {axis::kBatch, axis::kLength, axis::kHeadsAct};

TEST(AxisRules, ABatchTakesAsManyAxesAsDivideIt) {
  const auto rules = AxisRules::defaults();
  const Mesh m = mesh(4, 2, 1, 1);
  EXPECT_EQ(rules.resolve(m, kActivation, {8, 16, 64}).dims, (Spec{{"data", "fsdp"}, {}, {}}));
  EXPECT_EQ(rules.resolve(m, kActivation, {4, 16, 64}).dims, (Spec{{"data"}, {}, {}}));
  EXPECT_EQ(rules.resolve(m, kActivation, {2, 16, 64}).dims, (Spec{{"fsdp"}, {}, {}}));
  EXPECT_EQ(rules.resolve(m, {axis::kConvBatch, "", "", axis::kOutChannels}, {4, 8, 8, 64}).dims,
            (Spec{{"data"}, {}, {}, {}}));
  EXPECT_TRUE(rules.resolve(m, kActivation, {3, 16, 64}).replicated());
}

TEST(AxisRules, WhatABatchLeavesOfFsdpDividesTheSequence) {
  for (const char* table : {"",
                            "[['activation_batch', ['data', 'fsdp']], ['activation_length', 'context'], "
                            "['activation_heads', 'tensor'], ['embed', ['context', 'fsdp']]]"}) {
    const AxisRules rules = AxisRules::make({.logical_axis_rules = {table}, .data_sharding = {}}, kMesh, true);
    // The command of the reference's documentation: 128 devices, a batch of 32.
    const Mesh pod = mesh(32, 4, 1, 1);
    EXPECT_EQ(rules.resolve(pod, kActivation, {32, 75600, 5120}).dims, (Spec{{"data"}, {"fsdp"}, {}}));
    EXPECT_EQ(rules.resolve(pod, {axis::kBatch, axis::kSelfLength, axis::kSelfHeads}, {32, 75600, 40}).dims,
              (Spec{{"data"}, {"fsdp"}, {}}));
    EXPECT_EQ(rules.resolve(pod, {axis::kBatch, axis::kCrossLength, axis::kCrossHeads}, {32, 75600, 40}).dims,
              (Spec{{"data"}, {"fsdp"}, {}}));
    EXPECT_EQ(rules.resolve(pod, {axis::kHeads, axis::kEmbed}, {5120, 5120}).dims, (Spec{{}, {"fsdp"}}));
    EXPECT_EQ(rules.resolve(pod, kActivation, {128, 75600, 5120}).dims, (Spec{{"data", "fsdp"}, {}, {}}));
    EXPECT_EQ(rules.resolve(pod, {axis::kBatch, axis::kLength, "", ""}, {32, 1, 6, 64}).dims,
              (Spec{{"data"}, {}, {}, {}}));
    // With context, which splits the sequence too.
    EXPECT_EQ(rules.resolve(mesh(1, 2, 2, 2), kActivation, {1, 16, 64}).dims,
              (Spec{{}, {"fsdp", "context"}, {"tensor"}}));
    EXPECT_EQ(rules.resolve(mesh(1, 2, 2, 2), kActivation, {1, 6, 64}).dims, (Spec{{}, {"context"}, {"tensor"}}));
  }
}

TEST(AxisRules, LogsHowBatchesAreShardedAndWhatIsReplicated) {
  const AxisRules with = AxisRules::make({}, kMesh, true), without = AxisRules::defaults();
  auto message = [](const AxisRules& rules, const Mesh& m, const std::vector<std::string>& names,
                    const std::vector<int64_t>& dims) {
    testing::internal::CaptureStderr();
    rules.resolve(m, names, dims);
    return testing::internal::GetCapturedStderr();
  };
  const Mesh m = mesh(2, 4, 1, 1);
  EXPECT_THAT(message(with, m, kActivation, {26, 16, 64}),
              HasSubstr("mesh: each device computes 13 of 26 samples (data = 2); fsdp = 4 shards the sequence of each "
                        "sample"));
  EXPECT_THAT(message(with, m, kActivation, {208, 16, 64}),
              HasSubstr("mesh: each device computes 26 of 208 samples (data = 2, fsdp = 4); fsdp = 4 shards its rows"));
  EXPECT_THAT(
      message(without, m, kActivation, {26, 16, 64}),
      ::testing::AllOf(HasSubstr("W "), HasSubstr("mesh: activation_batch of size 26 is replicated over fsdp = 4, "
                                                  "which does not divide it")));
  EXPECT_EQ(message(without, m, kActivation, {26, 17, 64}), "");  // logged once
  EXPECT_THAT(message(with, m, kActivation, {26, 17, 64}),
              HasSubstr("mesh: activation_length of size 17 is replicated over fsdp = 4"));
  EXPECT_THAT(message(without, m, {axis::kHeads, axis::kEmbed}, {8, 10}),
              HasSubstr("mesh: embed of size 10 is replicated over fsdp = 4"));
  EXPECT_THAT(message(without, m, kActivation, {1, 16, 64}),
              HasSubstr("mesh: activation_batch of size 1 is replicated over data = 2, fsdp = 4"));
  EXPECT_EQ(message(without, m, {axis::kNorm, axis::kEmbed}, {7, 1}), "");  // nothing to split
}

// S0-101
TEST(AxisRules, FsdpBatchSplitsWhatFsdpSplits) {
  const MeshConfig config{.ici_data_parallelism = 1,
                          .ici_fsdp_parallelism = 2,
                          .ici_tensor_parallelism = 2,
                          .ici_fsdp_batch_parallelism = 2};
  Topology eight;
  for (int i = 0; i < 8; ++i) eight.devices.push_back({.id = i});
  const Mesh m = Mesh::make(config, eight);
  // The reference's table and data_sharding, which lack the axis.
  const ShardingKeys keys{.logical_axis_rules = {"[['activation_batch', ['data', 'fsdp']], ['embed', 'fsdp']]"},
                          .data_sharding = {"[['data', 'fsdp', 'context', 'tensor']]"}};
  for (const ShardingKeys& k : {ShardingKeys{}, keys}) {
    const AxisRules rules = AxisRules::make(k, config.axes());
    EXPECT_EQ(rules.resolve(m, {axis::kBatch, "embed"}, {8, 8}).dims, (Spec{{"fsdp", "fsdp_batch"}, {}}));
    EXPECT_EQ(rules.resolve(m, {"mlp", "embed"}, {8, 8}).dims, (Spec{{"tensor"}, {"fsdp", "fsdp_batch"}}));
    EXPECT_EQ(rules.resolve(m, {axis::kData}, {8}).dims, (Spec{{"fsdp", "fsdp_batch", "tensor"}}));
  }
}

TEST(AxisRules, UniformAttentionAddsTheSequence) {
  const ShardingKeys keys{.logical_axis_rules = {"[['activation_heads', 'tensor'], ['activation_length', 'tensor']]"},
                          .data_sharding = {}};
  const std::vector<AxisRule> rules = AxisRules::make(keys, kMesh).rules();
  const std::vector<AxisRule> expected = {{"activation_self_attn_heads", {"tensor"}},
                                          {"activation_self_attn_q_length", {"context"}},
                                          {"activation_self_attn_kv_length", {}},
                                          {"activation_cross_attn_heads", {"tensor"}},
                                          {"activation_cross_attn_q_length", {"context"}},
                                          {"activation_cross_attn_kv_length", {}},
                                          {"activation_heads", {"tensor"}},
                                          {"activation_length", {"tensor"}},
                                          {"activation_length", {"context"}},
                                          {"activation_kv_length", {"context"}},
                                          {"mlp", {"tensor"}}};
  EXPECT_EQ(rules, expected);
}

TEST(AxisRules, WithoutUniformAttentionTheTableRulesTheSequence) {
  ShardingKeys keys{.logical_axis_rules = {"[['activation_heads', 'tensor'], ['mlp', null]]"},
                    .data_sharding = {"[['data', 'fsdp']]"},
                    .attention_sharding_uniform = false};
  const std::vector<AxisRule> expected = {
      {axis::kData, {"data", "fsdp"}}, {"activation_heads", {"tensor"}}, {"mlp", {}}};
  EXPECT_EQ(AxisRules::make(keys, kMesh).rules(), expected);
  keys.logical_axis_rules.text.clear();
  const AxisRules built_in = AxisRules::make(keys, kMesh);
  for (const AxisRule& r : built_in.rules()) EXPECT_NE(r.logical, axis::kLength);
}

// S1-3…6
TEST(AxisRules, DefaultsSplitAttentionAndConvolutions) {
  const auto rules = AxisRules::defaults();
  const Mesh m = mesh(2, 2, 1, 2);
  EXPECT_EQ(rules.resolve(m, {axis::kHeads, axis::kEmbed}, {64, 64}).dims, (Spec{{"tensor"}, {"fsdp"}}));
  EXPECT_EQ(rules.resolve(m, {axis::kConvOut, axis::kConvIn, "", ""}, {64, 32, 3, 3}).dims,
            (Spec{{"fsdp"}, {}, {}, {}}));
  EXPECT_EQ(rules.resolve(m, {axis::kConvBatch, "", "", axis::kOutChannels}, {4, 8, 8, 64}).dims,
            (Spec{{"data", "fsdp"}, {}, {}, {"tensor"}}));
  EXPECT_EQ(rules.resolve(mesh(1, 1, 4, 2), {axis::kBatch, axis::kLength, axis::kHeadsAct}, {4, 16, 64}).dims,
            (Spec{{}, {"context"}, {"tensor"}}));
}

}  // namespace
}  // namespace md
