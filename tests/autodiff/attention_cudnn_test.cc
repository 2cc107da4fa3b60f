// Attention on NVIDIA GPUs: the text of cuDNN's custom calls and the conditions for them. Compiles for GPUs that this
// machine does not have and checks that nothing is gathered. The results need a GPU.
#include <fmt/core.h>

#include "maxdiffusion/mesh/axis_rules.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/attention_cudnn.h"
#include "maxdiffusion/pjrt/topology.h"
#include "tests/autodiff/gradient_check.h"
#include "tests/autodiff/mesh_attention.h"
#include "tests/topology.h"

namespace md {
namespace {

using namespace gradient_check;  // NOLINT

GraphOptions on_gpu() {
  GraphOptions o;
  o.platform = Platform::gpu;
  o.nvidia_kernels = true;
  return o;
}

/// Traces attention and the gradients of its sum, with shapes `queries` and `keys`.
void trace(Graph& g, const Shape& queries, const Shape& keys, const AttentionOptions& o) {
  const Tensor q = g.input("q", queries), k = g.input("k", keys), v = g.input("v", keys);
  const Tensor y = attention(q, k, v, o);
  g.output("y", y);
  int i = 0;
  for (Tensor d : grad(sum(cast(y, DType::f32)), {q, k, v})) g.output(std::to_string(i++), d);
}

std::string text_of(const Shape& queries, const Shape& keys, const AttentionOptions& o) {
  Graph g(on_gpu());
  trace(g, queries, keys, o);
  return to_stablehlo(g);
}

/// The statement that calls `target`, starting at that name, without its location and with quotes unescaped.
std::string call_of(const std::string& text, const std::string& target) {
  const size_t at = text.find("call_target_name = \"" + target + "\""), end = text.find('\n', at);
  if (at == text.npos) return "";
  std::string call = text.substr(at, end - at);
  call = call.substr(0, call.find(" loc("));
  std::erase(call, '\\');
  return call;
}

/// The members of the backend configuration that are equal in the forward and backward calls.
const std::string kConfig =
    R"(backend_config = "{"operation_queue_id":"0","wait_on_operation_queues":[],"cudnn_fmha_backend_config":{)"
    R"("algorithm":{"algo_id":"0","math_type":"TENSOR_OP_MATH","tuning_knobs":{"17":"1","24":"0"},)"
    R"("is_cudnn_frontend":true,"workspace_size":"0"},"fmha_scale":0.125,"dropout_rate":0.0,)"
    R"("intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","3","48","80"],)"
    R"("layout":{"minor_to_major":["3","2","1","0"]},"is_dynamic_dimension":[false,false,false,false]},"seed":42,)"
    R"("is_flash_attention":true,"mask_type":"NO_MASK","sliding_window_length":0,)";

const std::string kRows = "dense<[3, 2, 1, 0]> : tensor<4xindex>", kSums = "dense<[2, 1, 0]> : tensor<3xindex>",
                  kHeadsFirst = "dense<[3, 1, 2, 0]> : tensor<4xindex>", kScratch = "dense<[0]> : tensor<1xindex>";

std::string product(const std::string& name, const std::string& left, const std::string& right,
                    const std::string& left_batch, const std::string& right_batch) {
  return "\"" + name + R"(_dot_dimension_numbers":{"lhs_contracting_dimensions":[")" + left +
         R"("],"rhs_contracting_dimensions":[")" + right + R"("],"lhs_batch_dimensions":["0",")" + left_batch +
         R"("],"rhs_batch_dimensions":["0",")" + right_batch + "\"]}";
}

// S4-3
TEST(CudnnAttention, IsCalledAsTheCompilerKnowsIt) {
  const Shape q{DType::bf16, {2, 48, 3, 64}}, k{DType::bf16, {2, 80, 3, 64}};
  const std::string text = text_of(q, k, mesh_attention_options("flash"));
  EXPECT_EQ(call_of(text, "__cudnn$fmhaSoftmax"),
            "call_target_name = \"__cudnn$fmhaSoftmax\", api_version = 2 : i32, has_side_effect = false, "
            "operand_layouts = [" +
                kRows + ", " + kRows + ", " + kRows + "], result_layouts = [" + kHeadsFirst + ", " + kSums + ", " +
                kScratch + "], output_operand_aliases = [], " + kConfig + product("bmm1", "3", "3", "2", "2") + "," +
                product("bmm2", "3", "1", "1", "2") +
                "}}\"} : (tensor<2x48x3x64xbf16>, tensor<2x80x3x64xbf16>, tensor<2x80x3x64xbf16>) -> "
                "(tensor<2x3x48x64xbf16>, tensor<2x3x48xf32>, tensor<0xui8>)");
  EXPECT_EQ(call_of(text, "__cudnn$fmhaSoftmaxBackward"),
            "call_target_name = \"__cudnn$fmhaSoftmaxBackward\", api_version = 2 : i32, has_side_effect = false, "
            "operand_layouts = [" +
                kRows + ", " + kRows + ", " + kRows + ", " + kSums + ", " + kRows + ", " + kRows +
                "], result_layouts = [" + kHeadsFirst + ", " + kHeadsFirst + ", " + kHeadsFirst + ", " + kScratch +
                "], output_operand_aliases = [], " + kConfig + product("bmm1_grad_gemm1", "2", "1", "1", "2") + "," +
                product("bmm1_grad_gemm2", "3", "1", "1", "2") + "," + product("bmm2_grad_gemm1", "2", "1", "1", "2") +
                "," + product("bmm2_grad_gemm2", "3", "3", "2", "2") +
                "}}\"} : (tensor<2x48x3x64xbf16>, tensor<2x80x3x64xbf16>, tensor<2x80x3x64xbf16>, "
                "tensor<2x3x48xf32>, tensor<2x48x3x64xbf16>, tensor<2x48x3x64xbf16>) -> "
                "(tensor<2x3x48x64xbf16>, tensor<2x3x80x64xbf16>, tensor<2x3x80x64xbf16>, tensor<0xui8>)");
}

// S4-3
TEST(CudnnAttention, IsTakenWhereCudnnCan) {
  struct Case {
    const char* what;
    DType type;
    int64_t head;
    const char* kernel;
    bool taken;
  };
  for (const Case& c :
       {Case{"bf16", DType::bf16, 64, "flash", true}, Case{"f16", DType::f16, 64, "flash", true},
        Case{"by the reference's name", DType::bf16, 40, "cudnn_flash_te", true},
        Case{"the largest head", DType::bf16, 128, "flash", true},
        Case{"a larger head", DType::bf16, 136, "flash", false},
        Case{"no multiple of 8", DType::bf16, 36, "cudnn_flash_te", false}, Case{"f32", DType::f32, 64, "flash", false},
        Case{"not asked for", DType::bf16, 64, "dot_product", false}}) {
    const Shape shape{c.type, {2, 16, 2, c.head}};
    const std::string text = text_of(shape, shape, mesh_attention_options(c.kernel));
    EXPECT_EQ(count(text, std::string("\"") + kCudnnAttentionCall + "\""), c.taken) << c.what;
    EXPECT_EQ(count(text, std::string("\"") + kCudnnAttentionGradCall + "\""), c.taken) << c.what;
  }
  const Shape shape{DType::bf16, {2, 16, 2, 64}};
  EXPECT_TRUE(text_of(shape, shape, mesh_attention_options("flash", true)).find(R"(mask_type\":\"CAUSAL)") !=
              std::string::npos);
  EXPECT_EQ(count(text_of(shape, shape, mesh_attention_options("flash", true)), kCudnnAttentionCall), 2);
}

/// Compiles attention and its gradient for eight H100; returns custom calls and collectives.
AheadOfTime compiled(const pjrt::Topology& gpus, const MeshConfig& config, const char* kernel, int64_t keys,
                     const CompileConfig& compile = {}) {
  const Mesh mesh = Mesh::make(config, topology(gpus));
  const AxisRules rules = AxisRules::defaults();
  Graph g(graph_options(mesh, topology(gpus), &rules));
  const LogicalAxes axes = {axis::kBatch, axis::kLength, axis::kHeadsAct, ""};
  const Tensor q = g.input("q", {DType::bf16, {8, 512, 4, 64}}, axes),
               k = g.input("k", {DType::bf16, {8, keys, 4, 64}}, axes),
               v = g.input("v", {DType::bf16, {8, keys, 4, 64}}, axes);
  const Tensor y = attention(q, k, v, mesh_attention_options(kernel));
  const std::vector<Tensor> d = grad(sum(cast(y, DType::f32) * cast(y, DType::f32)), {q, k, v});
  const char* like[] = {"q", "k", "v"};
  for (size_t i = 0; i < d.size(); ++i) g.output(std::string("d") + like[i], d[i], like[i]);
  return compile_ahead(gpus, mesh, g, compile, "attention");
}

// S0-100, S1-45, S4-3
TEST(CudnnAttention, AheadOfTimeProgramsGatherNothing) {
  std::string path;
  try {
    path = pjrt::Plugin::find("gpu");
  } catch (const Error&) {
    GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); attention is not compiled for GPUs";
  }
  const pjrt::Topology gpus = absent_devices("gpu", "1x1x8", path, 1, "h100");
  EXPECT_TRUE(graph_options(Mesh::single(), topology(gpus)).nvidia_kernels);
  struct Case {
    const char* kernel;
    MeshConfig mesh;
    std::vector<std::string> kinds;  // of collectives that send keys to queries
  };
  for (const Case& c :
       {Case{"flash", {.ici_data_parallelism = 2, .ici_fsdp_parallelism = 2, .ici_tensor_parallelism = 2}, {}},
        Case{"ring", {.ici_data_parallelism = 2, .ici_context_parallelism = 4}, {"collective-permute"}},
        Case{"ulysses", {.ici_data_parallelism = 2, .ici_context_parallelism = 4}, {"all-to-all"}}}) {
    const AheadOfTime ahead = compiled(gpus, c.mesh, c.kernel, 512);
    ASSERT_TRUE(ahead.custom_calls.contains(kCudnnAttentionCall)) << c.kernel;
    ASSERT_TRUE(ahead.custom_calls.contains(kCudnnAttentionGradCall)) << c.kernel;
    ASSERT_TRUE(ahead.collectives);
    for (const CollectiveSum& sum : *ahead.collectives)
      EXPECT_TRUE(std::ranges::count(c.kinds, sum.kind)) << c.kernel << ": " << to_string(sum);
    EXPECT_EQ(ahead.collectives->size(), c.kinds.size()) << c.kernel;
  }
}

// cuDNN's gradient without algorithms whose sums differ from run to run stores all logits, and of some sizes it fails.
TEST(CudnnAttention, SumsInAnyOrderAndNothingElseDoes) {
  std::string path;
  try {
    path = pjrt::Plugin::find("gpu");
  } catch (const Error&) {
    GTEST_SKIP() << "jax-cuda13-pjrt is not there (cmake/wheels_gpu.txt); attention is not compiled for GPUs";
  }
  const pjrt::Topology gpus = absent_devices("gpu", "1x1x1", path, 1, "h100");
  constexpr const char* kFlag = "xla_gpu_exclude_nondeterministic_ops";
  const auto excluded = [&](const char* kernel, const std::string& flags) {
    const AheadOfTime ahead = compiled(gpus, {}, kernel, 512, {.xla_flags = flags});
    EXPECT_EQ(ahead.custom_calls.contains(kCudnnAttentionGradCall), std::string_view(kernel) == "flash") << kernel;
    return ahead.report.flags.at(kFlag);
  };
  EXPECT_EQ(excluded("flash", ""), "False");
  EXPECT_EQ(excluded("flash", fmt::format("--{}=True", kFlag)), "True");
  EXPECT_EQ(excluded("tokamax_flash", ""), "True");  // this program's kernel
  EXPECT_EQ(excluded("dot_product", ""), "True");
}

}  // namespace
}  // namespace md
