// Attention on a mesh of TPUs that this machine does not have: each way to send keys to queries must call the kernels,
// forward and backward, without gathering.
#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/autodiff/mesh_attention.h"
#include "tests/tiles/programs.h"
#include "tests/topology.h"

namespace md {
namespace {

AheadOfTime compiled(const MeshConfig& config, const char* kernel, int64_t queries, int64_t keys, int64_t head_dim,
                     DType type) {
  static const pjrt::Topology tpus = absent_devices("tpu", "v5p:2x2x1");
  const Mesh mesh = Mesh::make(config, topology(tpus));
  const AxisRules rules = AxisRules::defaults();
  Graph g(graph_options(mesh, topology(tpus), &rules));
  const LogicalAxes axes = {axis::kBatch, axis::kLength, axis::kHeadsAct, ""};
  const Tensor q = g.input("q", {type, {4, queries, 4, head_dim}}, axes),
               k = g.input("k", {type, {4, keys, 4, head_dim}}, axes),
               v = g.input("v", {type, {4, keys, 4, head_dim}}, axes);
  const Tensor y = cast(attention(q, k, v, mesh_attention_options(kernel)), DType::f32);
  const std::vector<Tensor> d = grad(sum(y * y), {q, k, v});
  const char* like[] = {"q", "k", "v"};
  for (size_t i = 0; i < d.size(); ++i) g.output(std::string("d") + like[i], d[i], like[i]);
  return compile_ahead(tpus, mesh, g, {}, "attention");
}

TEST(TileAttentionOnMeshes, EveryWayToBringKeysCallsTheKernels) {
  if (const std::string missing = no_compiler("tpu"); !missing.empty()) GTEST_SKIP() << missing;
  const MeshConfig context{.ici_data_parallelism = 1, .ici_context_parallelism = 4};
  struct Case {
    const char* kernel;
    MeshConfig mesh;
    const char* kind;  // of the collectives that send keys
    int64_t queries = 512, keys = 512, head_dim = 128;
    DType type = DType::bf16;
  };
  for (const Case& c :
       {Case{"flash", {.ici_data_parallelism = 4}, ""}, Case{"ring", context, "collective-permute"},
        Case{"ring", context, "collective-permute", 500, 500, 64}, Case{"ulysses", context, "all-to-all"},
        Case{"ulysses", context, "all-to-all", 80, 80, 16, DType::f32}, Case{"flash", context, "", 512, 77, 64}}) {
    const std::string what = std::string(c.kernel) + " " + std::to_string(c.queries) + " " + std::to_string(c.head_dim);
    const AheadOfTime ahead = compiled(c.mesh, c.kernel, c.queries, c.keys, c.head_dim, c.type);
    ASSERT_TRUE(ahead.custom_calls.contains("tpu_custom_call")) << what;
    EXPECT_GE(ahead.custom_calls.at("tpu_custom_call").operations, 2) << what;
    ASSERT_TRUE(ahead.collectives) << what;
    for (const CollectiveSum& sum : *ahead.collectives) EXPECT_NE(sum.kind, "all-gather") << what;
    bool brought = !*c.kind;
    for (const CollectiveSum& sum : *ahead.collectives) brought |= sum.kind == c.kind;
    EXPECT_TRUE(brought) << what;
  }
}

/// attention() with Qwen3's heads on one TPU, and its gradients: the module's text, and the temporary memory of
/// attention alone.
struct OneTpu {
  std::string text;
  int64_t temporary;
};
enum class With { grouped, repeated_heads, bias, segments, both, bias_of_queries };
OneTpu on_one_tpu(With with) {
  static const pjrt::Topology tpus = absent_devices("tpu", "v5p:2x2x1");
  GraphOptions o;
  o.platform = Platform::tpu;
  o.device_kind = tpus.devices()[0].kind;
  Graph g(o);
  const int64_t batch = 2, length = 512, size = 128;
  std::vector<Tensor> x = {g.input("q", {DType::bf16, {batch, length, 32, size}}),
                           g.input("k", {DType::bf16, {batch, length, 8, size}}),
                           g.input("v", {DType::bf16, {batch, length, 8, size}})};
  AttentionOptions how{.kernel = "flash"};
  if (with == With::bias || with == With::both || with == With::bias_of_queries)
    x.push_back(how.bias = g.input(
                    "bias", {DType::f32, {batch, 1, with == With::bias_of_queries ? length : int64_t{1}, length}}));
  if (with == With::segments || with == With::both)
    how.query_segments = how.key_segments = g.input("segments", {DType::s32, {batch, length}});
  const auto as_given = [&](Tensor t) { return with == With::repeated_heads ? repeated_heads(t, 4) : t; };
  const Tensor y = cast(attention(x[0], as_given(x[1]), as_given(x[2]), how), DType::f32);
  int n = 0;
  for (Tensor t : grad(sum(y * y), x)) g.output("d" + std::to_string(n++), t);
  OneTpu out{to_stablehlo(g), 0};
  if (with <= With::repeated_heads)
    out.temporary = tpus.compile(out.text, {.device_ids = {tpus.devices()[0].id}, .flags = {}}).memory()->temporary;
  return out;
}

TEST(TileAttentionOnOneTpu, TakesGroupedHeadsABiasOfKeysAndSegmentsAsTheyAre) {
  if (const std::string missing = no_compiler("tpu"); !missing.empty()) GTEST_SKIP() << missing;
  const auto calls = [](const OneTpu& p) {
    size_t n = 0;
    for (size_t at = 0; (at = p.text.find("tpu_custom_call", at)) != std::string::npos; ++at) ++n;
    return n;
  };
  const OneTpu grouped = on_one_tpu(With::grouped), repeated = on_one_tpu(With::repeated_heads);
  EXPECT_EQ(calls(grouped), 2U);
  EXPECT_EQ(calls(repeated), 2U);
  EXPECT_LT(grouped.temporary, repeated.temporary);
  for (const With with : {With::bias, With::segments, With::both})
    EXPECT_EQ(calls(on_one_tpu(with)), 2U) << static_cast<int>(with);
  EXPECT_EQ(calls(on_one_tpu(With::bias_of_queries)), 0U);
}

}  // namespace
}  // namespace md
