// Attention on meshes of eight virtual devices has the results and gradients of one device, however keys are exchanged.

#include "maxdiffusion/kernels/kernels.h"
#include "maxdiffusion/mesh/axis_rules.h"
#include "tests/autodiff/gradient_check.h"
#include "tests/autodiff/mesh_attention.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

struct Case {
  const char* name;
  int64_t queries, keys;
  bool causal;
  bool lengths = false;  // key lengths per sample: all, then fewer and fewer
  int64_t group = 1;     // query heads per key head
};
constexpr Case kCases[] = {{"self", 16, 16, false},
                           {"odd self", 13, 13, false},
                           {"odd causal", 13, 13, true},
                           {"cross", 16, 5, false},
                           {"lengths", 13, 13, false, true},
                           {"causal lengths", 16, 16, true, true},
                           {"cross lengths", 16, 5, false, true},
                           {"pairs of heads", 16, 16, true, false, 2},
                           {"fours of heads", 13, 13, true, false, 4}};
constexpr const char* kKernels[] = {"dot_product", "flash", "ring", "ulysses", "ulysses_ring"};

/// Outputs of each case and kernel: y and the gradients of a function of y by q, k and v. Inputs 3·i to 3·i + 2 are q,
/// k and v of case i.
Traced attentions(DType type, const std::vector<const char*>& kernels, int64_t heads) {
  std::vector<Shape> shapes;
  for (const Case& c : kCases)
    for (const auto& [length, group] : {std::pair{c.queries, int64_t{1}}, {c.keys, c.group}, {c.keys, c.group}})
      shapes.push_back({type, {4, length, heads / group, 6}});
  return {shapes, [kernels](Graph& g, const std::vector<Tensor>& x) {
            std::vector<Tensor> out;
            for (size_t i = 0; i < std::size(kCases); ++i)
              for (const char* kernel : kernels) {
                const std::vector<Tensor> in(x.begin() + static_cast<int64_t>(3 * i),
                                             x.begin() + static_cast<int64_t>(3 * i) + 3);
                AttentionOptions o = mesh_attention_options(kernel, kCases[i].causal);
                const auto n = static_cast<int32_t>(kCases[i].keys);
                if (kCases[i].lengths)
                  o.lengths = constant(
                      g, HostArray::of<int32_t>(Shape{DType::s32, {4}}, std::vector<int32_t>{n, n - 1, n / 2 + 1, 2}));
                Tensor y = attention(in[0], in[1], in[2], o);
                out.push_back(y);
                for (Tensor d : grad(sum(square(y) + sin(y)), in)) out.push_back(d);
              }
            return out;
          }};
}

const CompileConfig kQuick{.jax_cache_dir = "off", .xla_flags = "--xla_backend_optimization_level=0"};

std::vector<HostArray> run_on(const Devices& d, const Traced& traced) {
  const AxisRules rules = AxisRules::defaults();
  Graph g(d.graph_options(&rules));
  traced.trace(g);
  const Program program = compile(d, g, kQuick, "attention");
  std::vector<Array> arrays;
  std::vector<Array*> pointers;
  for (const HostArray& a : traced.inputs()) arrays.push_back(d.put(a, program.input_sharding(arrays.size())));
  for (Array& a : arrays) pointers.push_back(&a);
  std::vector<HostArray> out;
  for (Array& a : program.run(pointers)) out.push_back(d.get(a));
  return out;
}

struct MeshSizes {
  const char* name;
  int64_t data, fsdp, context, tensor;
};
void PrintTo(const MeshSizes& m, std::ostream* os) { *os << m.name; }

Devices open(const MeshSizes& m) {
  return Devices::open("cpu", m.data * m.fsdp * m.context * m.tensor,
                       {.ici_data_parallelism = m.data,
                        .ici_fsdp_parallelism = m.fsdp,
                        .ici_context_parallelism = m.context,
                        .ici_tensor_parallelism = m.tensor});
}

void expect_as_one_device(const Devices& devices, DType type, double tolerance) {
  constexpr int64_t kHeads = 8;
  const std::vector<const char*> kernels(std::begin(kKernels), std::end(kKernels));
  const auto expected = run_on(one_device(), attentions(type, {"dot_product"}, kHeads));
  const auto out = run_on(devices, attentions(type, kernels, kHeads));
  ASSERT_EQ(out.size(), expected.size() * kernels.size());
  const char* what[] = {"y", "dq", "dk", "dv"};
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t c = i / 4 / kernels.size(), kernel = i / 4 % kernels.size();
    expect_close(out[i].to_doubles(), expected[4 * c + i % 4].to_doubles(), tolerance,
                 fmt::format("{} of {}, {}", what[i % 4], kCases[c].name, kernels[kernel]));
  }
}

class AttentionMesh : public testing::TestWithParam<MeshSizes> {};
INSTANTIATE_TEST_SUITE_P(EightDevices, AttentionMesh,
                         testing::Values(MeshSizes{"Data2Context4", 2, 1, 4, 1},
                                         MeshSizes{"Fsdp2Context2Tensor2", 1, 2, 2, 2}),
                         [](const auto& m) { return m.param.name; });

// S1-17
TEST_P(AttentionMesh, GivesResultsAndGradientsOfOneDevice) {
  expect_as_one_device(open(GetParam()), DType::f64, 1e-11);
}

TEST(AttentionMesh, UsesTheCpuKernelOnEachDevice) {
  const Devices devices = open({"", 1, 1, 4, 2});
  expect_as_one_device(devices, DType::f32,
                       1e-4);  // gradients of these waves are differences of numbers 1000 times larger
  const AxisRules rules = AxisRules::defaults();
  Graph g(devices.graph_options(&rules));
  attentions(DType::f32, {"ring"}, 8).trace(g);
  // The kernel runs cross attention, the divisible self attention, and non-causal attention with lengths; the other
  // cases pass positions and run composed.
  EXPECT_EQ(count(to_stablehlo(g), std::string("@") + kAttentionKernel + "\""), 0);
  EXPECT_EQ(count(to_stablehlo(g), std::string("\"") + kAttentionKernel + "\""), 4);
  EXPECT_EQ(count(to_stablehlo(g), std::string("\"") + kAttentionGradKernel + "\""), 4);
}

/// The program's text before partitioning, for self attention and its gradient.
std::string text_of(const char* kernel, int64_t heads) {
  const AxisRules rules = AxisRules::defaults();
  Graph g(open({"", 1, 1, 4, 2}).graph_options(&rules));
  const Shape shape = f64({1, 16, heads, 6});
  with_gradients({shape, shape, shape}, [&](Graph&, const std::vector<Tensor>& x) {
    return sum(attention(x[0], x[1], x[2], mesh_attention_options(kernel)));
  }).trace(g);
  return to_stablehlo(g);
}

// S2-18
TEST(AttentionMesh, KernelNameSelectsTheCollectives) {
  struct Collectives {
    const char* kernel;
    int64_t heads;  // half of them per device, before 4 share a sequence
    int gathered, scattered, passed, exchanged;
  };
  // Gathered: k and v, again in the backward pass. Passed on: k, v; in the backward pass also dk, dv. Exchanged: q, k,
  // v, y; in the backward pass q, k, v, y, dy, and dq, dk, dv.
  for (const Collectives& c : {Collectives{"flash", 8, 0, 0, 0, 12},
                               {"flash", 6, 4, 2, 0, 0},
                               {"ring", 8, 0, 0, 6, 0},
                               {"ulysses", 8, 0, 0, 0, 12},
                               {"tokamax_ring_custom", 8, 0, 0, 6, 0},
                               {"ulysses_ring", 8, 0, 0, 0, 12}}) {
    const std::string text = text_of(c.kernel, c.heads);
    EXPECT_EQ(count(text, "\"stablehlo.all_gather\""), c.gathered) << c.kernel;
    EXPECT_EQ(count(text, "\"stablehlo.reduce_scatter\""), c.scattered) << c.kernel;
    EXPECT_EQ(count(text, "\"stablehlo.collective_permute\""), c.passed) << c.kernel;
    EXPECT_EQ(count(text, "\"stablehlo.all_to_all\""), c.exchanged) << c.kernel;
  }
}

// S1-18
TEST(AttentionMesh, MemoryGrowsWithTheLengthAndNotItsSquare) {
  const Devices devices = open({"", 1, 1, 2, 1});
  auto temporary = [&](const char* kernel, int64_t length) {
    const AxisRules rules = AxisRules::defaults();
    Graph g(devices.graph_options(&rules));
    const Shape shape = f64({1, length, 2, 16});
    with_gradients({shape, shape, shape}, [&](Graph&, const std::vector<Tensor>& x) {
      return sum(square(attention(x[0], x[1], x[2], mesh_attention_options(kernel))));
    }).trace(g);
    return static_cast<double>(compile(devices, g, kQuick, "attention").memory()->temporary);
  };
  for (const char* kernel : {"flash", "ring", "ulysses"})
    EXPECT_LT(temporary(kernel, 4096), 2.2 * temporary(kernel, 2048)) << kernel;
}

// S1-27, S1-51, S1-26
TEST(AttentionMesh, HeadsThatDoNotDivideAreRefusedWithNumbers) {
  auto refusal = [](const MeshSizes& m, const char* kernel, int64_t heads = 3) {
    const AxisRules rules = AxisRules::defaults();
    Graph g(open(m).graph_options(&rules));
    Tensor q = g.input("q", f64({4, 16, heads, 6}));
    try {
      PathScope path(g, "blocks.0.attn1");
      attention(q, q, q, mesh_attention_options(kernel));
    } catch (const Error& e) {
      EXPECT_TRUE(e.code() == Code::invalid_config) << e.what();
      return std::string(e.what());
    }
    return std::string("none");
  };
  EXPECT_EQ(refusal({"", 4, 1, 1, 2}, "flash"),
            "ici_tensor_parallelism: 3 heads do not divide among the 2 devices of the mesh axis tensor, at "
            "blocks.0.attn1; 1, 3 can share them");
  // S1-26, S1-27: the heads of Wan.
  EXPECT_EQ(refusal({"", 1, 1, 1, 3}, "flash", 40),
            "ici_tensor_parallelism: 40 heads do not divide among the 3 devices of the mesh axis tensor, at "
            "blocks.0.attn1; 1, 2, 4, 5, 8, 10, 20, 40 can share them");
  const std::string ulysses = refusal({"", 4, 1, 2, 1}, "ulysses");
  EXPECT_NE(ulysses.find("got heads=3 and context_shards=2"), std::string::npos) << ulysses;
  EXPECT_EQ(refusal({"", 4, 1, 2, 1}, "ulysses_ring"), "none");
}

}  // namespace
}  // namespace md
