// Attention on a mesh of TPUs that are not here: every way to bring keys to queries calls the kernels, forward and
// back, and nothing is gathered for them.
#include "maxdiffusion/autodiff/grad.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/runtime/runtime.h"
#include "tests/autodiff/mesh_attention.h"
#include "tests/tiles/programs.h"

namespace md {
namespace {

AheadOfTime compiled(const MeshConfig& config, const char* kernel, int64_t queries, int64_t keys, int64_t head_dim,
                     DType type) {
  static const pjrt::Topology tpus = pjrt::Topology::create("tpu", "v5p:2x2x1");
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
  if (const std::string missing = no_tpu_compiler(); !missing.empty()) GTEST_SKIP() << missing;
  const MeshConfig context{.ici_data_parallelism = 1, .ici_context_parallelism = 4};
  struct Case {
    const char* kernel;
    MeshConfig mesh;
    const char* kind;  // of the collectives that bring keys
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

}  // namespace
}  // namespace md
