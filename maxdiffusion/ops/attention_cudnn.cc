#include "maxdiffusion/ops/attention_cudnn.h"

#include <nlohmann/json.hpp>

#include "maxdiffusion/ops/custom_call.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/registry.h"

namespace md {
namespace {

using Json = nlohmann::ordered_json;

struct CudnnOptions {
  double scale;
  bool causal;
};

/// 64-bit integers in the JSON form of protocol buffers are texts.
Json numbers(const Axes& values) {
  Json list = Json::array();
  for (int64_t v : values) list.push_back(std::to_string(v));
  return list;
}

Json product(int64_t left, int64_t right, const Axes& left_batch, const Axes& right_batch) {
  return {{"lhs_contracting_dimensions", numbers({left})},
          {"rhs_contracting_dimensions", numbers({right})},
          {"lhs_batch_dimensions", numbers(left_batch)},
          {"rhs_batch_dimensions", numbers(right_batch)}};
}

/// Dimension numbers of the products of q, k, v, y [B, L, H, D] and the logits [B, H, Lq, Lk] in a call.
Json products(bool backward) {
  const Axes outside = {0, 2}, logits = {0, 1};
  if (!backward)
    return {{"bmm1_dot_dimension_numbers", product(3, 3, outside, outside)},
            {"bmm2_dot_dimension_numbers", product(3, 1, logits, outside)}};
  return {{"bmm1_grad_gemm1_dot_dimension_numbers", product(2, 1, logits, outside)},
          {"bmm1_grad_gemm2_dot_dimension_numbers", product(3, 1, logits, outside)},
          {"bmm2_grad_gemm1_dot_dimension_numbers", product(2, 1, logits, outside)},
          {"bmm2_grad_gemm2_dot_dimension_numbers", product(3, 3, outside, outside)}};
}

/// The JSON text of a GpuBackendConfig.
std::string config(const Shape& q, const Shape& k, const CudnnOptions& o, bool backward) {
  const Json logits = {{"element_type", q.dtype == DType::bf16 ? "BF16" : "F16"},
                       {"dimensions", numbers({q.dim(0), q.dim(2), q.dim(1), k.dim(1)})},
                       {"layout", {{"minor_to_major", numbers({3, 2, 1, 0})}}},
                       {"is_dynamic_dimension", {false, false, false, false}}};
  Json call = {{"algorithm",
                {{"algo_id", "0"},
                 {"math_type", "TENSOR_OP_MATH"},
                 {"tuning_knobs", {{"17", "1"}, {"24", "0"}}},
                 {"is_cudnn_frontend", true},
                 {"workspace_size", "0"}}},
               {"fmha_scale", o.scale},
               {"dropout_rate", 0.0},
               {"intermediate_tensor_shape", logits},
               {"seed", 42},
               {"is_flash_attention", true},
               {"mask_type", o.causal ? "CAUSAL" : "NO_MASK"},
               {"sliding_window_length", 0}};
  call.update(products(backward));
  return Json{
      {"operation_queue_id", "0"}, {"wait_on_operation_queues", Json::array()}, {"cudnn_fmha_backend_config", call}}
      .dump();
}

/// Prints the call. The first `attended` results are [B, L, H, D]; the call returns them as [B, H, L, D] with the
/// memory layout of [B, L, H, D].
void emit(EmitCtx& c, const char* target, size_t attended, bool backward) {
  const auto& o = c.attrs<CudnnOptions>();
  std::vector<Value> in;
  for (int i = 0; i < c.in_count(); ++i) in.push_back(c.in(i));
  CustomCall call{.target = target,
                  .results = c.node().outputs,
                  .backend_config = config(in[0].shape, in[1].shape, o, backward),
                  .config_is_text = true};
  for (size_t i = 0; i < call.results.size(); ++i) {
    Dims& dims = call.results[i].dims;
    if (i < attended) std::swap(dims[1], dims[2]);
    call.layouts.push_back(i < attended ? Axes{3, 1, 2, 0} : Axes{2, 1, 0});
  }
  call.results.push_back({DType::u8, {0}});  // scratch memory: the compiler sets its size
  call.layouts.push_back({0});
  const auto out = emit_custom_call(c, in, call);
  for (size_t i = 0; i + 1 < out.size(); ++i) {
    const int n = static_cast<int>(i);
    c.set_out(i < attended ? c.emit("stablehlo.transpose", {out[i]}, c.out(n), "permutation = array<i64: 0, 2, 1, 3>")
                           : out[i],
              n);
  }
}

/// Inputs: q, k, v, lse, dy, y.
constexpr OpDef kCudnnAttentionGrad = {
    .name = "cudnn_attention_grad",
    .infer = [](const InferCtx& c) { return std::vector<Shape>(c.in.begin(), c.in.begin() + 3); },
    .emit = [](EmitCtx& c) { emit(c, kCudnnAttentionGradCall, 3, true); },
    .flops = [](const Node& n) { return attention_flops(n, 4); },
};

/// Inputs: q, k, v; outputs: y, and the logarithms of the sums of exponentials. The caller defines the gradient.
constexpr OpDef kCudnnAttention = {
    .name = "cudnn_attention",
    .infer =
        [](const InferCtx& c) {
          const Shape& q = c.in[0];
          return std::vector<Shape>{q, {DType::f32, {q.dim(0), q.dim(2), q.dim(1)}}};
        },
    .emit = [](EmitCtx& c) { emit(c, kCudnnAttentionCall, 1, false); },
    .flops = [](const Node& n) { return attention_flops(n, 2); },
};

}  // namespace

const char* cudnn_attention_refuses(Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
  const GraphOptions& o = q.graph().options();
  if (!o.nvidia_kernels) return "the device is not an NVIDIA GPU from Ampere on";
  if (!options.cudnn) return "the key attention names this program's kernels";
  if (!o.one_device()) return "the call is not inside a manual computation";
  if (!options.in_blocks) return "all logits are requested";
  if (options.bias || options.key_bias) return "there is a bias";
  if (options.key_segments) return "there are segments";
  if (options.first_query || options.first_key || options.keys >= 0) return "keys are masked by positions on the mesh";
  if (options.lengths) return "samples have keys of different lengths";
  if (q.dtype() != DType::bf16 && q.dtype() != DType::f16) return "cuDNN supports bf16 and f16";
  if (k.dtype() != q.dtype() || v.dtype() != q.dtype()) return "cuDNN supports one type";
  if (q.dim(3) > 128) return "cuDNN supports heads of at most 128 values";
  if (q.dim(3) % 8 != 0) return "cuDNN supports heads whose size is a multiple of 8";
  return nullptr;
}

AttentionResult cudnn_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& options) {
  const auto out = apply_multi(kCudnnAttention, {q, k, v}, CudnnOptions{options.scale, options.causal});
  return {out[0], out[1]};
}

AttentionGradient cudnn_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& options) {
  const DType type = q.dtype();
  const auto out = apply_multi(kCudnnAttentionGrad, {q, k, v, lse, cast(dy, type), cast(y, type)},
                               CudnnOptions{options.scale, options.causal});
  return {out[0], out[1], out[2]};
}

OpList cudnn_attention_ops() { return {&kCudnnAttention, &kCudnnAttentionGrad}; }

}  // namespace md
