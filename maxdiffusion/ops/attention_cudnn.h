// Attention as one call of cuDNN's fused kernel, forward and backward, which stores no logits. XLA maps the calls to
// cuDNN on NVIDIA GPUs from Ampere on. The partitioner would gather their operands, so on meshes they are inside manual
// computations (attention_mesh.h). Source: jax/_src/cudnn/fused_attention_stablehlo.py and
// xla/service/gpu/cublas_cudnn.h (form of the calls, supported arrays).
#pragma once

#include "maxdiffusion/ops/attention_parts.h"

namespace md {

inline constexpr const char* kCudnnAttentionCall = "__cudnn$fmhaSoftmax";
inline constexpr const char* kCudnnAttentionGradCall = "__cudnn$fmhaSoftmaxBackward";

/// Why cuDNN does not support these arrays; null if it does.
const char* cudnn_attention_refuses(Tensor q, Tensor k, Tensor v, const LocalAttention& options);

/// Like local_attention() and local_attention_gradient(); all in the type of q, lse in f32.
AttentionResult cudnn_attention(Tensor q, Tensor k, Tensor v, const LocalAttention& options);
AttentionGradient cudnn_attention_gradient(Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor dy,
                                           const LocalAttention& options);

}  // namespace md
