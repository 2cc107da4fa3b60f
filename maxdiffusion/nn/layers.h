// Layers. Images are channels last inside the graph: [B, H, W, C]. Weights keep PyTorch's layouts. Parameters are cast
// to the dtype of x; statistics are f32.
#pragma once

#include <array>
#include <optional>

#include "maxdiffusion/nn/scope.h"

namespace md::nn {

struct LinearOptions {
  int64_t out = 0;
  bool bias = true;
  std::string in_axis = {}, out_axis = {};  // logical axes of the weight [out, in]
  std::optional<Init> init = {};            // of the weight; LeCun normal when empty
};
/// y = x·Wᵀ + b.   x: [..., in]   weight: [out, in]   bias: [out].
Tensor linear(const Scope& s, Tensor x, const LinearOptions& o);

struct Conv2dOptions {
  int64_t out = 0, kernel = 3, stride = 1, padding = 1;
  bool bias = true;
  std::string in_axis = "conv_in", out_axis = "conv_out";  // both empty: only the batch axis is sharded
  bool pad_right_bottom = false;                           // zeros after only (the VAE encoder's downsampler)
};
/// x: [B, H, W, in]   weight: [out, in, k, k].
Tensor conv2d(const Scope& s, Tensor x, const Conv2dOptions& o);

struct Conv3dOptions {
  int64_t out = 0;
  std::array<int64_t, 3> kernel = {3, 3, 3}, stride = {1, 1, 1};     // frames, height, width
  std::array<int64_t, 3> pad_low = {1, 1, 1}, pad_high = {1, 1, 1};  // zeros before and after
  bool bias = true;
  std::string in_axis = "", out_axis = "";
};
/// x: [B, F, H, W, in]   weight: [out, in, kf, kh, kw].
Tensor conv3d(const Scope& s, Tensor x, const Conv3dOptions& o);

/// Normalizes channels (last axis) in `groups`, with statistics over space and the group's channels; then applies the
/// activation of that config name (below), if any. weight, bias: [C]. `annotated`: x is sharded as results of
/// convolutions; false: only along the batch.
Tensor group_norm(const Scope& s, Tensor x, int64_t groups, double eps, const std::string& activation = "",
                  bool annotated = true);
/// Normalizes over the last axis. `affine`: weight, bias [C].
Tensor layer_norm(const Scope& s, Tensor x, double eps, bool affine = true);
/// x / sqrt(mean(x²) + eps) · weight over the last axis. `axis`: logical axis of the weight [C].
Tensor rms_norm(const Scope& s, Tensor x, double eps, const std::string& axis = "");
/// x / max(‖x‖, 1e-12) · sqrt(C) · gamma over the last axis, then the activation of that config name, if any. gamma:
/// [C] with `ones` trailing axes of size 1, as in channels-first models.
Tensor unit_norm(const Scope& s, Tensor x, int64_t ones, const std::string& activation = "");
/// weight: [rows, width]; ids: any integer shape I → I + [width], in the scope's dtype. added: [added, width], rows of
/// ids from `rows` on, which published models do not have; 0: there are none.
Tensor embedding(const Scope& s, Tensor ids, int64_t rows, int64_t width, Init init = init::normal(0.02),
                 int64_t added = 0);
inline constexpr char kAddedRows[] = "added";
bool is_added_rows(const Param& p);
/// Of the parameters below, added rows alone are trained, in f32.
Scope with_added_rows_trained(const Scope& s);
ParamTable without_added_rows(const ParamTable& params);
/// Sinusoids of `t` [B] → [B, dim] f32: half = dim/2, f_i = exp(−ln(max_period)·i/(half − shift)); cos first if `flip`.
Tensor timestep_embedding(Tensor t, int64_t dim, bool flip_sin_to_cos, double freq_shift, double max_period = 10000);
/// linear_1, activation, linear_2.
Tensor timestep_mlp(const Scope& s, Tensor x, int64_t width, const std::string& activation = "silu");
/// Nearest neighbour by two, [B, H, W, C] → [B, 2H, 2W, C].
Tensor upsample_nearest(Tensor x);
/// Activation by config name: "silu"/"swish", "gelu", "quick_gelu", "gelu_tanh"/"gelu_new", "relu", "mish".
Tensor activation(const std::string& name, Tensor x);

/// In training (Scope::with_random), each value of x becomes 0 with probability p = ScopeOptions::dropout, else x / (1
/// − p). Without random numbers: x. Masks depend on the step and the layer's path, so they are the same when
/// recomputed, on every mesh and after resuming. The result is named kDropout. x: [B, …].
Tensor dropout(const Scope& s, Tensor x);
inline constexpr const char* kDropout = "dropout";

/// f(x) as a checkpoint region of the scope's remat policy, with x named hidden_states; plain f(x) if the policy is
/// NONE.
Tensor remat(const Scope& s, const std::function<Tensor(Tensor)>& f, Tensor x);

/// `n` blocks whose parameters are `s / i / …`, or, with scan_layers, one loop over stacked parameters `s / "*" / …`;
/// two if some are swapped (ScopeOptions::blocks_to_swap): these first, then the others, `s / "*+3" / …`.
/// Each block is a checkpoint region (remat above). A repeat inside a stacked block is unrolled.
/// from: the number of the first block that runs; 0 if they are stacked.
using Block = std::function<Tensor(const Scope&, Tensor)>;
Tensor repeat(const Scope& s, int64_t n, Tensor x, const Block& block, int64_t from = 0);
/// Like the above; block i also receives row i of every tensor of `stacked` [n, …].
using BlockOfRows = std::function<Tensor(const Scope&, Tensor, const std::vector<Tensor>& rows)>;
Tensor repeat(const Scope& s, int64_t n, Tensor x, const std::vector<Tensor>& stacked, const BlockOfRows& block,
              int64_t from = 0);
/// Like the above, for blocks that pass several values to the next block.
using BlockOfStreams = std::function<std::vector<Tensor>(const Scope&, const std::vector<Tensor>&)>;
std::vector<Tensor> repeat(const Scope& s, int64_t n, const std::vector<Tensor>& xs, const BlockOfStreams& block,
                           int64_t from = 0);
/// Maps f over the scopes of `n` blocks and stacks each result [..] to [n, ..].
using LayerResults = std::function<std::vector<Tensor>(const Scope&)>;
std::vector<Tensor> per_layer(const Scope& s, int64_t n, const LayerResults& f);

}  // namespace md::nn
