// Parts of transformers with two streams, the tokens of an image and of a text: blocks, in which both streams attend to
// all tokens and each has its own projections, norms and feed-forward network, modulated by the conditions; and the
// last layer. FLUX.1, FLUX.2 and Qwen-Image differ in names, in the conditions, and in the order of the tokens.
// Parameter names are diffusers'. Norms and modulation are computed in f32. Source: Esser et al. 2024, section 4.
#pragma once

#include <string>
#include <vector>

#include "maxdiffusion/nn/rotary.h"
#include "maxdiffusion/nn/scope.h"

namespace md {
class ConfigReader;
}

namespace md::joint {

/// D = heads · head_dim: features of a token.
struct Sizes {
  int64_t heads, head_dim;
  double eps = 1e-6;  // of all norms
  bool bias = true;   // of all linear layers
  int64_t width() const { return heads * head_dim; }
};

/// 'axes_dims_rope' of a config: `count` even numbers whose sum is head_dim. Throws invalid_config.
void check_rotary_axes(const ConfigReader& r, const std::vector<int64_t>& dims, size_t count, int64_t head_dim);

Tensor f32(Tensor x);
Tensor linear(const Scope& s, Tensor x, int64_t out, const std::string& in_axis, const std::string& out_axis,
              bool bias = true);
/// The hidden states of a stream between blocks: [B, L, D].
Tensor stream(Tensor x);

/// Sinusoidal embedding of a number [B] in [0, 1000], through two layers: [B, D].
Tensor embedded_number(const Scope& s, Tensor number, int64_t width, int64_t sinusoids = 256, bool bias = true);
/// linear_1, SiLU, linear_2.
Tensor condition_mlp(const Scope& s, Tensor x, int64_t width, bool bias = true);

/// Modulation of one part of a block: [B, 1, D] f32 each, or [B, L, D] if tokens have different conditions.
struct Modulation {
  Tensor shift, scale, gate;
};
/// `uses` sets of shift, scale and gate, computed from conditions [B, D]; s: scope of the layer that computes them.
std::vector<Modulation> modulations(const Scope& s, Tensor conditions, int64_t width, int64_t uses, bool bias = true);
/// LN(x) · (1 + scale) + shift, in the dtype of x.
Tensor modulated(const Scope& s, Tensor x, const Modulation& m, double eps = 1e-6);
/// to + y · gate.
Tensor gated(Tensor to, Tensor y, const Modulation& m);

struct Heads {
  Tensor q, k, v;  // [B, L, N, d]
};
/// Parameter names of the projections and norms of one stream, and the remat policies' name for the projections'
/// results.
struct HeadNames {
  const char *q, *k, *v, *norm_q, *norm_k, *projected;
};
Heads heads_of(const Scope& s, const Sizes& sizes, Tensor x, const HeadNames& names);
/// Like the above, from projections that are already computed, [B, L, D] each.
Heads heads_of(const Scope& s, const Sizes& sizes, Tensor q, Tensor k, Tensor v, const HeadNames& names);
/// Attention → [B, L, D]. lengths: as in AttentionOptions.
Tensor attend(const Scope& s, const Heads& h, const nn::Rotary& positions, Tensor lengths = {});
/// A linear layer to four times `width`, then GELU.
Tensor widened(const Scope& s, Tensor x, int64_t width);

/// Results of joint attention for both streams, after the output projections. s: scope of attention; text, image:
/// modulated tokens; positions, lengths: as in Block.
struct Attended {
  Tensor text, image;
};
Attended attend_jointly(const Scope& s, const Sizes& sizes, Tensor text, Tensor image, const nn::Rotary& positions,
                        Tensor lengths = {});

struct BlockNames {
  const char *image_modulation, *text_modulation, *image_feed_forward, *text_feed_forward;
};
/// Inputs that all blocks share.
struct Block {
  Sizes sizes;
  BlockNames names;
  Tensor conditions;     // [B, D]
  nn::Rotary positions;  // of all tokens in sequence order: the text's, then the image's
  Tensor lengths = {};   // s32 [B]: tokens of the whole sequence that are attended to; with it the image's tokens come
                         // first
  /// [B, D]: conditions of the last `references` tokens of the image's stream; absent: they use `conditions`.
  Tensor reference_conditions = {};
  int64_t references = 0;
};
/// streams: text and image. Returns both in this order.
std::vector<Tensor> block(const Scope& s, const Block& b, const std::vector<Tensor>& streams);

/// The image's stream as the attention of a block gets it, normalized and modulated. s: scope of the block.
Tensor block_input(const Scope& s, const Block& b, Tensor image);

/// norm_out, modulated by the conditions, then proj_out: [B, L, D] → [B, L, out], f32.
Tensor last_layer(const Scope& s, Tensor x, Tensor conditions, int64_t out, double eps = 1e-6, bool bias = true);

}  // namespace md::joint
