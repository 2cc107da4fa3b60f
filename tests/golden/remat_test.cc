// Rematerialisation policies on models: gradients are unchanged, memory shrinks in the documented order, and values are
// named at the same places in all models.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "tests/golden/flux_case.h"
#include "tests/golden/model_case.h"
#include "tests/golden/wan_case.h"

namespace md {
namespace {

NamedTensors run_unet(const Scope& s, const nlohmann::json& config, NamedTensors& in) {
  return {{"sample", unet2d(s, UNetConfig::from_json(config),
                            {.sample = in.at("sample"),
                             .timestep = in.at("timestep"),
                             .encoder_hidden_states = in.at("encoder_hidden_states")})}};
}

NamedTensors run_clip(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {{"last", clip_text(s, ClipTextConfig::from_json(json), in.at("ids")).last_hidden_state}};
}

NamedTensors run_t5(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  return {{"last", t5_encoder(s, T5Config::from_json(json), in.at("ids"), in.at("mask"))}};
}

struct Model {
  const char* golden;
  NamedTensors (*forward)(const Scope&, const nlohmann::json&, NamedTensors&);
};
constexpr Model kUnet = {"unet_no_mid", run_unet}, kWan = {"wan_t2v", run_wan}, kWanOfImages = {"wan_i2v", run_wan},
                kFlux = {"flux_dev", run_flux};

ScopeOptions with(const char* policy, RematNames names = {}) {
  return {.remat = policy, .remat_names = std::move(names), .scan_layers = true};
}
const RematNames kOfTheSeeds = {.saved = {value::kAttnOutput, value::kQueryProj},
                                .offloaded = {value::kXqOut, value::kXkOut, value::kFfnActivation}};

class Policies : public testing::TestWithParam<Model> {};

// S0-68, S2-39, S2-40, S2-42
TEST_P(Policies, LeaveGradientsAsTheyAre) {
  const ModelCase c = load_case(GetParam().golden);
  const ModelRun none = run_case(c, GetParam().forward, with("NONE"));
  for (const char* policy : {"FULL", "MATMUL_WITHOUT_BATCH", "HIDDEN_STATE_WITH_OFFLOAD", "CUSTOM"}) {
    const ModelRun run = run_case(c, GetParam().forward, with(policy, kOfTheSeeds));
    EXPECT_EQ(distance(run.outputs, none.outputs).value, 0) << policy;
    const Distance grads = distance(run.grads, none.grads);
    fmt::print("  {}: {:.2g} ({})\n", policy, grads.value, grads.name);
    EXPECT_LE(grads.value, 1e-6) << policy << ", worst at " << grads.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Remat, Policies, testing::Values(kUnet, kWan),
                         [](const auto& info) { return std::string(info.param.golden); });

/// Names of values in a graph and its loop bodies, with the paths of the layers that produce them.
void find_names(const Graph& g, std::map<std::string, std::set<std::string>>& names) {
  for (const auto& n : g.nodes()) {
    if (!n->name.empty()) names[n->name].insert(*n->path);
    for (const auto& body : n->bodies) find_names(*body, names);
  }
}
std::map<std::string, std::set<std::string>> names_in(const Model& m) {
  const ModelCase c = load_case(m.golden);
  Graph g;
  ParamTable table;
  NamedTensors in;
  for (const auto& [name, array] : c.inputs) in[name] = g.input(name, array.shape());
  m.forward(Scope(g, table, "model", with("FULL")), c.config, in);
  std::map<std::string, std::set<std::string>> names;
  find_names(g, names);
  return names;
}

// S0-74…80, S2-43
TEST(NamedValues, AreAtTheSamePlacesInAllModels) {
  const std::set<std::string> of_the_documents = {value::kAttnOutput,    value::kQueryProj,   value::kKeyProj,
                                                  value::kValueProj,     value::kXqOut,       value::kXkOut,
                                                  value::kFfnActivation, value::kHiddenStates};
  std::set<std::string> found;
  for (const Model& m : {kUnet, kWan, kWanOfImages, kFlux, Model{"clip_projection", run_clip}, Model{"umt5", run_t5}}) {
    const auto names = names_in(m);
    for (const std::string& name : of_the_documents) EXPECT_TRUE(names.contains(name)) << m.golden << ": " << name;
    EXPECT_TRUE(names.contains(value::kSelfAttn)) << m.golden;
    for (const auto& [name, paths] : names) found.insert(name);
  }
  // The list used to validate config keys has exactly these names.
  EXPECT_EQ(found, std::set<std::string>(std::begin(value::kAll), std::end(value::kAll)));

  using Paths = std::set<std::string>;
  const std::string wan = "blocks.*.", unet = "down_blocks.0.attentions.0.transformer_blocks.*.";
  auto names = names_in(kWan);
  EXPECT_EQ(names[value::kSelfAttn], (Paths{wan + "attn1"}));
  EXPECT_EQ(names[value::kCrossAttn], (Paths{wan + "attn2"}));
  EXPECT_EQ(names[value::kXqOut], (Paths{wan + "attn1", wan + "attn2"}));
  EXPECT_TRUE(names[value::kFfnActivation].contains("blocks.*"));
  names = names_in(kUnet);
  EXPECT_TRUE(names[value::kSelfAttn].contains(unet + "attn1"));
  EXPECT_TRUE(names[value::kCrossAttn].contains(unet + "attn2"));
  EXPECT_FALSE(names[value::kSelfAttn].contains(unet + "attn2"));
  EXPECT_TRUE(names[value::kFfnActivation].contains(unet + "ff"));
  names = names_in(kWanOfImages);
  EXPECT_EQ(names[value::kKeyProj], (Paths{wan + "attn1"}));
  EXPECT_EQ(names[value::kKeyProjText], (Paths{wan + "attn2"}));
  EXPECT_EQ(names[value::kValueProjImg], (Paths{wan + "attn2"}));
  names = names_in(kFlux);
  EXPECT_EQ(names[value::kImgQkvProj], (Paths{"transformer_blocks.*"}));
  EXPECT_EQ(names[value::kLin1Hidden], (Paths{"single_transformer_blocks.*"}));
  EXPECT_EQ(names[value::kAttnOutput], (Paths{"transformer_blocks.*", "single_transformer_blocks.*"}));
}

/// The program text of a model's gradients without source locations.
std::string program_of(const Model& m, Platform platform, const ScopeOptions& options) {
  const ModelCase c = load_case(m.golden);
  Graph g(GraphOptions{.platform = platform});
  ParamTable table;
  NamedTensors in;
  for (const auto& [name, array] : c.inputs) in[name] = g.input(name, array.shape());
  const Tensor y = m.forward(Scope(g, table, "model", options), c.config, in).begin()->second;
  std::vector<Tensor> expected;
  for (const Param& p : table.params()) expected.push_back(p.value);
  int i = 0;
  for (Tensor d : grad(sum(square(y)), expected)) g.output(std::to_string(i++), d);
  std::string text;
  std::istringstream lines(to_stablehlo(g));
  for (std::string line; std::getline(lines, line);)
    if (!line.starts_with("#loc")) text += line.substr(0, line.rfind(" loc(#loc")) + "\n";
  return text;
}

int products(const Model& m, const ScopeOptions& options) {
  const std::string text = program_of(m, Platform::tpu, options), word = "stablehlo.dot_general";
  int n = 0;
  for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; at += word.size()) ++n;
  return n;
}

// A single-stream block has one fused projection to queries, keys and values, which is saved; a double-stream block
// recomputes its projections. Both save the attention output, which takes two products.
// S0-63
TEST(FluxOptimized, SavesSingleStreamProjectionsAndAttention) {
  EXPECT_EQ(products(kFlux, with("flux_optimized")) + 3 + 2 * 2, products(kFlux, with("FULL")));
  EXPECT_EQ(products(kFlux, with("CUSTOM", {.saved = {value::kTxtQkvProj}, .offloaded = {}})) + 3,
            products(kFlux, with("FULL")));
}

int moves_to_host(const Model& m, const ScopeOptions& options) {
  const std::string text = program_of(m, Platform::tpu, options), word = "\"pinned_host\"";
  int n = 0;
  for (size_t at = text.find(word); at != text.npos; at = text.find(word, at + 1)) ++n;
  return n;
}

// S0-67
TEST(PoliciesTogether, MoveWhatTheyNameToTheHost) {
  // In a loop over blocks: its carry, and two attention outputs, each with its log-sum-exp.
  EXPECT_EQ(moves_to_host(kWan, with("HIDDEN_STATE_WITH_OFFLOAD")), 1 + 2 * 2);
  EXPECT_EQ(moves_to_host(kWan, with("CUSTOM", {.saved = {value::kSelfAttn}, .offloaded = {value::kCrossAttn}})), 2);
  EXPECT_EQ(moves_to_host(kWan, with("MATMUL_WITHOUT_BATCH")), 0);
  EXPECT_EQ(moves_to_host(kWan, with("OFFLOAD_MATMUL_WITHOUT_BATCH")), 10);  // four per attention, two after
  // Three such loops, and the inputs of three residual blocks.
  EXPECT_EQ(moves_to_host(kUnet, with("HIDDEN_STATE_WITH_OFFLOAD")), 3 * (1 + 2 * 2) + 3);
}

TEST(PoliciesTogether, KeepOnACpuWhatTheyOffload) {
  const RematNames saved = {.saved = {value::kXqOut, value::kFfnActivation}, .offloaded = {}},
                   away = {.saved = {}, .offloaded = saved.saved};
  for (const Model& m : {kUnet, kWan}) {
    auto program = [&m](const ScopeOptions& options) { return program_of(m, Platform::cpu, options); };
    EXPECT_TRUE(program(with("OFFLOAD_MATMUL_WITHOUT_BATCH")) == program(with("MATMUL_WITHOUT_BATCH"))) << m.golden;
    EXPECT_TRUE(program(with("CUSTOM", away)) == program(with("CUSTOM", saved))) << m.golden;
    EXPECT_FALSE(program(with("CUSTOM", saved)) == program(with("FULL"))) << m.golden;
  }
}

/// Temporary memory of a Wan model's gradients, with more tokens than its golden.
int64_t temporary_of(const ScopeOptions& options) {
  const WanTransformerConfig config{.num_attention_heads = 2,
                                    .attention_head_dim = 16,
                                    .in_channels = 4,
                                    .out_channels = 4,
                                    .text_dim = 8,
                                    .freq_dim = 8,
                                    .ffn_dim = 128,
                                    .num_layers = 8};
  Graph g(cpu().graph_options());
  ParamTable table;
  const Tensor y = wan_transformer(Scope(g, table, "model", options), config,
                                   {.sample = g.input("sample", {DType::f32, {1, 4, 32, 32, 4}}),
                                    .timestep = g.input("timestep", {DType::f32, {1}}),
                                    .text = g.input("text", {DType::f32, {1, 8, 8}})});
  std::vector<Tensor> expected;
  for (const Param& p : table.params()) expected.push_back(p.value);
  int i = 0;
  for (Tensor d : grad(mean(square(cast(y, DType::f32))), expected))
    if (d) g.output(std::to_string(i++), d);
  return compile(cpu(), g, {.jax_cache_dir = "off", .xla_flags = "--xla_backend_optimization_level=0"}, "remat")
      .memory()
      ->temporary;
}

// S0-63…65
TEST(PoliciesTogether, TakeTheMoreMemoryTheMoreTheyKeep) {
  const int64_t none = temporary_of(with("NONE")), full = temporary_of(with("FULL")),
                hidden = temporary_of(with("HIDDEN_STATE_WITH_OFFLOAD")),
                linear = temporary_of(with("MATMUL_WITHOUT_BATCH"));
  fmt::print("  bytes: FULL {}, HIDDEN_STATE_WITH_OFFLOAD {}, MATMUL_WITHOUT_BATCH {}, NONE {}\n", full, hidden, linear,
             none);
  EXPECT_LT(full, hidden);
  EXPECT_LT(hidden, linear);
  EXPECT_LT(linear, none);
}

}  // namespace
}  // namespace md
