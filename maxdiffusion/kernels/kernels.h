// Kernels: handlers of custom calls for the CPU plugin, for operations that XLA compiles or runs slowly on CPUs. A
// program names them; runtime/ registers them with the plugin; GraphOptions::cpu_kernels enables them.
#pragma once

#include <vector>

namespace md {

struct Kernel {
  const char* name;  // as in stablehlo.custom_call
  void* handler;     // XLA_FFI_Handler*
};
const std::vector<Kernel>& cpu_kernels();

/// Calls other kernels in sequence: one instruction of a program instead of several.
///   operands  the inputs of the calls, except results of these calls
///   results   the results that are used outside; then, if needed, scratch memory (u8) for results that only these
///             calls use
///   attributes c0000, c0001, …: a dictionary for each call, in order:
///               kernel (text), attributes (dictionary of the kernel), operands (i64: their number),
///               arrays (i64 array: for each operand and then each result the number of the operand or result of the
///               fused call, counted together; byte offset in it, XLA_FFI_DataType, rank, dims)
inline constexpr const char* kFusedCallsKernel = "md_fused_calls";

/// Sums of squares over all elements of n arrays.
///   operands  n arrays, f32
///   result    f32[2]: of the elements, and of the elements clipped to ±max_value
///   attribute max_value (f64; ≤ 0: no limit)
/// Bit-identical for any number of threads.
inline constexpr const char* kSumOfSquaresKernel = "md_sum_of_squares";

/// AdamW over n parameters at once, in place: results share the memory of their operands.
///   operands  f32[6]: learning rate, 1 − β₁ᵏ, 1 − β₂ᵏ, factor on the gradients, 0 to change nothing, and the decay of
///             moving averages; then n gradients, n parameters, n first and n second moments, and n moving averages or
///             none, f32
///   results   n parameters, n first, n second moments, and the averages: parameter + (average − parameter)·keep
///   attributes b1, b2, eps, weight_decay, max_value (f64; max_value ≤ 0: no limit), averages (i64: 1 if present)
inline constexpr const char* kAdamwKernel = "md_adamw";

/// AdamW with 8-bit moments (base/dynamic_map.h): the n first and n second moments are u8, followed by n scales of
/// each, f32 [layers, blocks].
inline constexpr const char* kAdamw8bitKernel = "md_adamw8bit";

/// Lion over n parameters at once, in place.
///   operands  f32[4]: learning rate, factor on the gradients, 0 to change nothing, the decay of moving averages;
///             then n gradients, n parameters, n momenta, and n moving averages or none, f32
///   results   n parameters, n momenta, and the averages
///   attributes b1, b2, weight_decay, max_value (f64; max_value ≤ 0: no limit), averages (i64: 1 if present)
inline constexpr const char* kLionKernel = "md_lion";

/// Adafactor over n parameters at once, in place.
///   operands  f32[6]: learning rate, decay of second moments, what is added of new ones, factor on the gradients, 0 to
///             change nothing, the decay of moving averages; then n gradients, n parameters, n means of rows and n of
///             columns (not `factored`: n second moments), n first moments if b1 ≥ 0, n moving averages or none, f32
///   results   all lists except the gradients
///   attributes eps, least_size (of weights that steps are relative to), clip_threshold, b1, weight_decay, max_value
///             (f64; max_value ≤ 0: no limit), relative (i1: steps are relative to weights), factored (i1: second
///             moments of the last two dims are means), layers (i64[n]: layers of each parameter, along dim 0),
///             averages (i64: 1 if present)
/// Of this and the next: bit-identical for any number of threads.
inline constexpr const char* kAdafactorKernel = "md_adafactor";

/// CAME over n parameters at once, in place.
///   operands  f32[4]: learning rate, factor on the gradients, 0 to change nothing, the decay of moving averages; then
///   n
///             gradients, n parameters, n first moments, n means of rows and n of columns of squares, the same of
///             instabilities (not `factored`: n second moments), n moving averages or none, f32
///   results   all lists except the gradients
///   attributes b1, b2, b3, eps, eps_unstable, clip_threshold, weight_decay, max_value (f64); factored, layers,
///   averages
///             as above
inline constexpr const char* kCameKernel = "md_came";

/// Sums of n arrays over all processes of a job (processes/processes.h), in place. Collective.
///   operands  n arrays, f32
///   results   n sums, times `scale`: bit-identical in every process
///   attribute scale (f64)
inline constexpr const char* kProcessSumKernel = "md_process_sum";

/// Convolution over two or three spatial axes and its gradients. Either all arrays are f32, or all are bf16 with sums
/// and the gradients of w in f32. With bf16, w may be f32.
///   operands, result  of md_convolution: x [B, (F,) H, W, Ci], w [Co, Ci, (kf,) kh, kw] → y [B, (F',) H', W', Co]
///                     of md_convolution_input_grad: dy, w → dx     of md_convolution_weight_grad: x, dy → dw
///   attributes window  i64[6 or 9]: the stride of each axis; then zeros before and after, axis by axis
///              in_bf16 (i1): bf16 is multiplied directly, and f32 weights are rounded; else bf16 is widened
/// Results are reproducible to the bit on one machine with one number of threads; other numbers may round differently.
inline constexpr const char* kConvolutionKernel = "md_convolution";
inline constexpr const char* kConvolutionInputGradKernel = "md_convolution_input_grad";
inline constexpr const char* kConvolutionWeightGradKernel = "md_convolution_weight_grad";

/// Products of matrices, y[b, m, n] = Σₖ a[b, m, k] · c[b, k, n] + bias[n]. a and c are dense arrays in any order of
/// axes in which b, m, n and k have one stride each.
///   operands  a and c, each f32 or bf16; bias, f32 [n], or nothing
///   result    y, dense, b, m, n in this order; f32 or bf16. Sums are f32, rounded once
///   attributes sizes (i64[4]: of b, m, n, k), strides (i64[6]: of a's b, m, k and of c's b, k, n; one of a's m and k
///             is 1, and one of c's k and n), in_bf16 (i1): a and c are multiplied as bf16, f32 rounded when
///             read; else bf16 is widened when read
/// Results are reproducible to the bit on one machine with one number of threads; other numbers may round differently.
inline constexpr const char* kProductKernel = "md_product";

/// Sums of rows.
///   operands  x [groups…, rows…, C], f32 or bf16
///   result    f32 [groups…, C]
/// Bit-identical for any number of threads.
inline constexpr const char* kColumnSumsKernel = "md_column_sums";

/// y = a + b, rounded once.
///   operands  a [rows…, C]; b with as many elements as a, or one row of C for every n consecutive rows of a; each f32
///             or bf16
///   result    y like a
inline constexpr const char* kAddKernel = "md_add";

/// Concatenates arrays along one axis.
///   operands  n arrays, f32 or bf16, that differ only along that axis
///   result    y
///   attribute axis (i64)
inline constexpr const char* kConcatenateKernel = "md_concatenate";

/// One row of a stack, of any type. XLA slices bf16 in float32, and converts the whole stack for it before a loop.
///   operands  stack [n, …]; index, an s32 scalar, clamped to [0, n − 1]
///   result    row […]
inline constexpr const char* kReadRowKernel = "md_read_row";
/// Writes one row of a stack.
///   operands  stack [n, …]; row […]; index as in md_read_row
///   result    the stack, in place
inline constexpr const char* kWriteRowKernel = "md_write_row";

/// Numbers of eight bits as they are in another type.
///   operands  x, s8 or f8e4m3fn
///   result    y, f32 or bf16, of x's sizes
inline constexpr const char* kWidenKernel = "md_widen";
/// A matrix in NF4 (base/nf4.h) as numbers.
///   operands  codes u8 [R, C/2]; scales of blocks of 64, u8 [R, C/64]; scales of 256 of those, f32 [⌈R·C/64/256⌉]; the
///             mean, f32 [1]
///   result    y [R, C], f32 or bf16
inline constexpr const char* kWidenNf4Kernel = "md_widen_nf4";

/// y = g·s(g). `by` selects s(g): "erf": (1 + erf(g/√2))/2, "tanh": its approximation, "sigmoid": sigmoid(1.702·g).
/// Arithmetic is f32.
///   operands  x [rows…, C], f32 or bf16: g; gated: x [rows…, 2·C] with the halves a and g, and y = a·g·s(g)
///   result    y [rows…, C], like x
///   attributes by (string), gated (i1)
inline constexpr const char* kGeluKernel = "md_gelu";
/// Gradient of md_gelu.
///   operands  x, dy
///   result    dx
///   attributes those of md_gelu
inline constexpr const char* kGeluGradKernel = "md_gelu_grad";

/// softmax(scale · q·kᵀ) · v; `causal`: query i attends to keys 0 to i.
///   operands  q [B, Lq, H, D], k and v [B, Lk, H, D], all f32 or all bf16; arithmetic f32, but see in_bf16
///   results   y like q; f32[B, H, Lq]: logarithms of the sums of exponentials
///   attributes scale (f64), causal (i1), in_bf16 (i1): of bf16, operands of products are not widened to f32, and
///             probabilities are rounded to bf16; sums are f32
/// Neither results nor gradients depend on the number of threads, to the bit.
inline constexpr const char* kAttentionKernel = "md_attention";
/// Gradient of md_attention.
///   operands  q, k, v, y, logarithms, dy
///   results   dq, dk, dv
///   attributes as above
inline constexpr const char* kAttentionGradKernel = "md_attention_grad";

/// Group norm of x [B, space…, C]: y = (x − mean)·rstd·w + b, then SiLU if `silu`. x, y f32 or bf16; the rest f32.
///   operands  x, w [C], b [C]
///   results   y, mean [B, groups], rstd [B, groups]
///   attributes groups (i64), eps (f64), silu (i1)
/// All norms and their gradients: arithmetic is f32, long sums are f64; results do not depend on the number of threads.
inline constexpr const char* kGroupNormKernel = "md_group_norm";
/// Gradient of md_group_norm.
///   operands  x, dy, w, b, mean, rstd
///   results   dx, dw, db
///   attributes groups, silu
inline constexpr const char* kGroupNormGradKernel = "md_group_norm_grad";

/// Layer norm of x over its last axis.
///   operands  x, w [C], b [C]
///   results   y, mean and rstd (one per row)
///   attribute eps (f64)
inline constexpr const char* kLayerNormKernel = "md_layer_norm";
/// Gradient of md_layer_norm.
///   operands  x, dy, w, mean, rstd
///   results   dx, dw, db
inline constexpr const char* kLayerNormGradKernel = "md_layer_norm_grad";

}  // namespace md
