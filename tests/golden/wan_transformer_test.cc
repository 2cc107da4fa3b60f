// WanTransformer3DModel compared with diffusers: outputs and all gradients on tiny random configs, for every way to run
// blocks; and the guarantees of its two caches.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_weight_names.h"
#include "tests/golden/model_case.h"
#include "tests/golden/wan_case.h"
#include "tests/one_device.h"

namespace md {
namespace {

// The goldens are from a float64 run; diffusers' float32 run is one noise floor away from it.
constexpr double kNoiseFloors = 10;

/// Like run_wan, with precomputed keys and values of cross attention.
NamedTensors run_with_context(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  const WanTransformerConfig c = WanTransformerConfig::from_json(json);
  const WanContext context = wan_context(s, c, in.at("text"), in["image"]);
  return {{"sample",
           wan_transformer(s, c, {.sample = in.at("sample"), .timestep = in.at("timestep"), .context = &context})}};
}

void expect_near_reference(const ModelCase& c, const ModelRun& run) {
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}; noise floor {:.2g}), gradients {:.2g} ({}; noise floor {:.2g})\n", out.value,
             out.name, c.noise_floor_outputs, grads.value, grads.name, c.noise_floor_gradients);
  EXPECT_LE(out.value, kNoiseFloors * c.noise_floor_outputs) << "first at " << out.name;
  EXPECT_LE(grads.value, kNoiseFloors * c.noise_floor_gradients) << "worst at " << grads.name;
}

struct Variant {
  const char *name, *golden;
  NamedTensors (*forward)(const Scope&, const nlohmann::json&, NamedTensors&);
  ScopeOptions options = {};
};
void PrintTo(const Variant& w, std::ostream* os) { *os << w.name; }
class WanTransformer : public testing::TestWithParam<Variant> {};

// S0-61, S2-3, S2-16
TEST_P(WanTransformer, GivesTheOutputsAndGradientsOfTheReference) {
  const ModelCase c = load_case(GetParam().golden);
  expect_near_reference(c, run_case(c, GetParam().forward, GetParam().options));
}

/// Like run_wan, with all attention in the CPU kernel, which stores no logits: self attention, cross attention with the
/// text and, if present, with the image.
NamedTensors run_flash(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  NamedTensors out = run_wan(s, json, in);
  if (test_hardware() != "cpu") return out;  // others have no kernel for these sizes
  int calls = 0;
  for (const auto& node : s.graph().nodes()) calls += std::string_view(node->op->name) == "attention";
  const WanTransformerConfig c = WanTransformerConfig::from_json(json);
  EXPECT_EQ(calls, c.num_layers * (c.added_kv_proj_dim ? 3 : 2));
  return out;
}

/// Like run_wan, with attention as loops over blocks of queries and keys, as on devices without a kernel.
NamedTensors run_flash_in_blocks(const Scope& s, const nlohmann::json& json, NamedTensors& in) {
  NamedTensors out = run_wan(s, json, in);
  if (test_hardware() != "cpu") return out;  // these have kernels
  int loops = 0;
  for (const auto& node : s.graph().nodes()) {
    EXPECT_NE(std::string_view(node->op->name), "attention");
    loops += !node->bodies.empty();
  }
  EXPECT_GE(loops, WanTransformerConfig::from_json(json).num_layers);
  return out;
}

// S0-61, S2-3
TEST(WanTransformerFlash, MatchesReferenceOutputsAndGradients) {
  const ModelCase c = load_case("wan_t2v");
  const AttentionBlocks blocks{2, 4, 3, 2};
  expect_near_reference(
      c, run_case(c, run_flash_in_blocks, {.attention = "flash", .flash_min_seq_length = 0, .attention_blocks = blocks},
                  false));
}

const ScopeOptions kFlash = {.attention = "flash", .flash_min_seq_length = 0};

INSTANTIATE_TEST_SUITE_P(
    Goldens, WanTransformer,
    testing::Values(Variant{"T2V", "wan_t2v", run_wan}, Variant{"I2V", "wan_i2v", run_wan},
                    Variant{"FLF2V", "wan_flf2v", run_wan}, Variant{"TI2V", "wan_ti2v", run_wan},
                    Variant{"Mixed", "wan_mixed", run_wan},
                    Variant{"Scanned", "wan_i2v", run_wan, {.scan_layers = true}},
                    Variant{"Recomputed", "wan_ti2v", run_wan, {.remat = "FULL"}},
                    Variant{"ScannedAndRecomputed", "wan_mixed", run_wan, {.remat = "FULL", .scan_layers = true}},
                    Variant{"Flash", "wan_i2v", run_flash, kFlash},
                    Variant{"WithContextMadeBeforehand", "wan_mixed", run_with_context},
                    Variant{"WithContextMadeBeforehandAndScanned",
                            "wan_i2v",
                            run_with_context,
                            {.remat = "FULL", .scan_layers = true}}),
    [](const auto& info) { return info.param.name; });

class WanInBf16 : public testing::TestWithParam<const char*> {};

// Weights are exact in bf16; activations have 8 bits, except those that the original keeps in f32: conditions, norms,
// modulation, the last projection. The worst are biases of keys, whose gradient nearly cancels: 0.05.
// S2-12, S2-13
TEST_P(WanInBf16, GivesOutputsAndGradientsNearTheReference) {
  const ModelCase c = load_case(GetParam());
  const ModelRun run = run_case(c, run_wan, {.weights = DType::bf16, .activations = DType::bf16});
  const Distance out = distance(run.outputs, c.outputs), grads = distance(run.grads, c.grads);
  fmt::print("  outputs {:.2g} ({}), gradients {:.2g} ({})\n", out.value, out.name, grads.value, grads.name);
  EXPECT_LE(out.value, 0.02) << "worst at " << out.name;
  EXPECT_LE(grads.value, 0.1) << "worst at " << grads.name;
}

INSTANTIATE_TEST_SUITE_P(Goldens, WanInBf16, testing::Values("wan_t2v", "wan_i2v"),
                         [](const auto& info) { return info.param; });

// P-17
TEST(WanNames, AreThoseThatTheConverterOfTheReferenceReads) {
  const auto pairs = parse_json(read_file(golden_path("wan_names.json")));
  EXPECT_EQ(pairs.size(), 55U);
  for (const auto& [original, diffusers] : pairs.items()) EXPECT_EQ(original_wan_name(diffusers), original);
  EXPECT_EQ(original_wan_name("blocks.*.attn2"), "blocks.*.cross_attn");
  EXPECT_EQ(original_wan_name("condition_embedder.image_embedder.pos_embed"), "img_emb.emb_pos");
  EXPECT_EQ(original_wan_name("proj_output.weight"), "proj_output.weight");
}

/// For both published versions: recorded diffusers names, and the names that its converter or the original program
/// uses.
// P-17
TEST(WanNames, OfAutoencodersAreThoseOfTheReferenceConverter) {
  const auto record = parse_json(read_file(golden_path("wan_vae_names.json")));
  for (const auto& [version, size] : {std::pair{"2.1", 194U}, std::pair{"2.2", 196U}}) {
    const WeightNameMap names = original_wan_vae_names(WanVaeConfig::from_json(record.at(version).at("config")));
    const auto& pairs = record.at(version).at("names");
    EXPECT_EQ(pairs.size(), size);
    for (const auto& [original, diffusers] : pairs.items()) {
      const std::vector<WeightAlias> found = names.aliases(diffusers);
      ASSERT_FALSE(found.empty()) << diffusers;
      EXPECT_EQ(found[0].full_name(), original);
      EXPECT_EQ(found[1].full_name(), "first_stage_model." + original);
    }
    EXPECT_TRUE(names.aliases("encoder.down_blocks").empty());
  }
}

TEST(WanResidual, ReplacesTheBlocksAndTheirInputs) {
  ModelCase c = load_case("wan_i2v");
  auto forward = [](const Scope& s, const nlohmann::json& json, NamedTensors& in) -> NamedTensors {
    StepReuse reuse;
    if (in["residual"]) reuse.arrays = {in["residual"]};
    const Tensor sample = wan_transformer(s, WanTransformerConfig::from_json(json),
                                          {.sample = in.at("sample"),
                                           .timestep = in.at("timestep"),
                                           .text = in["text"],
                                           .image = in["image"],
                                           .reuse = &reuse});
    return {{"sample", sample}, {"residual", reuse.arrays.at(0)}};
  };
  const ModelRun whole = run_case(c, forward);
  c.inputs.erase("text");
  c.inputs.erase("image");
  c.inputs["residual"] = whole.outputs.at("residual");
  c.grads.clear();
  for (const char* unread : {"blocks.", "condition_embedder.text_embedder.", "condition_embedder.image_embedder.",
                             "condition_embedder.time_proj."})
    std::erase_if(c.weights, [&](const auto& w) { return w.first.starts_with(unread); });
  const ModelRun skipped = run_case(c, forward);  // throws unless exactly these weights are used
  EXPECT_LE(distance(skipped.outputs, whole.outputs).value, 1e-6);
}

// A branch holds what depends on its inputs alone: whatever is outside runs in every step.
TEST(WanReuse, BlocksThatMayBeReusedAreInABranch) {
  const WanTransformerConfig c = WanTransformerConfig::from_json(load_case("wan_t2v").config);
  for (const StepReuse::Of of : {StepReuse::Of::other_blocks, StepReuse::Of::input_blocks}) {
    Graph g;
    ParamTable table;
    const auto input = [&](const char* name, Dims dims) { return g.input(name, {DType::f32, std::move(dims)}); };
    const Dims tokens = {2, 8, c.width()};  // of 2 × 4 × 4 latents in patches of 1 × 2 × 2
    StepReuse reuse{.of = of, .threshold = 0.1, .coefficients = {1, 0}, .runs = input("runs", {})};
    reuse.arrays =
        of == StepReuse::Of::other_blocks
            ? std::vector<Tensor>{input("first", tokens), input("others", tokens)}
            : std::vector<Tensor>{input("before", {2, 1, 6, c.width()}), input("added", tokens), input("distance", {})};
    const Tensor y = wan_transformer(Scope(g, table, "transformer"), c,
                                     {.sample = input("sample", {2, 2, 4, 4, c.in_channels}),
                                      .timestep = input("timestep", {2}),
                                      .text = input("text", {2, 5, c.text_dim}),
                                      .reuse = &reuse});
    g.output("y", y);
    const auto softmaxes = [](const Graph& graph) {
      return std::ranges::count_if(graph.nodes(),
                                   [](const auto& n) { return std::string_view(n->op->name) == "reduce_max"; });
    };
    int64_t inside = 0;
    for (const auto& node : g.nodes())
      if (std::string_view(node->op->name) == "if") inside += softmaxes(*node->bodies.at(0));
    const int64_t first =
        of == StepReuse::Of::other_blocks ? 1 : 0;  // each block attends to the tokens and to the text
    EXPECT_EQ(softmaxes(g), 2 * first);
    EXPECT_EQ(inside, 2 * (c.num_layers - first));
  }
}

}  // namespace
}  // namespace md
