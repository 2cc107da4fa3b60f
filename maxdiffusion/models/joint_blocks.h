// What transformers with an image's tokens and a text's as two streams consist of: blocks in which both streams attend
// to all tokens, with projections, norms and a feed-forward part of their own, modulated by the conditions; and the
// last layer. FLUX.1, FLUX.2 and Qwen-Image differ in names, in what the conditions are, and in the order of the
// tokens. Parameter names are diffusers'. Norms and modulation are computed in f32. Source: Esser et al. 2024,
// section 4.
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
/// A stream as it goes from block to block: [B, L, D].
Tensor stream(Tensor x);

/// Sinusoids of a number [B], from 0 to 1000, through two layers: [B, D].
Tensor embedded_number(const Scope& s, Tensor number, int64_t width, int64_t sinusoids = 256, bool bias = true);
/// linear_1, SiLU, linear_2.
Tensor condition_mlp(const Scope& s, Tensor x, int64_t width, bool bias = true);

/// One use of a block's modulation, each [B, 1, D] f32.
struct Modulation {
  Tensor shift, scale, gate;
};
/// `uses` times shift, scale and gate, of conditions [B, D]; s: of the layer that makes them.
std::vector<Modulation> modulations(const Scope& s, Tensor conditions, int64_t width, int64_t uses, bool bias = true);
/// LN(x) · (1 + scale) + shift, in the dtype of x.
Tensor modulated(const Scope& s, Tensor x, const Modulation& m, double eps = 1e-6);
/// to + y · gate.
Tensor gated(Tensor to, Tensor y, const Modulation& m);

struct Heads {
  Tensor q, k, v;  // [B, L, N, d]
};
/// What projections and norms of one stream are called, and what the projections' results are for remat policies.
struct HeadNames {
  const char *q, *k, *v, *norm_q, *norm_k, *projected;
};
Heads heads_of(const Scope& s, const Sizes& sizes, Tensor x, const HeadNames& names);
/// The same of projections that are there, [B, L, D] each.
Heads heads_of(const Scope& s, const Sizes& sizes, Tensor q, Tensor k, Tensor v, const HeadNames& names);
/// [B, L, D]. lengths: as AttentionOptions has it.
Tensor attend(const Scope& s, const Heads& h, const nn::Rotary& positions, Tensor lengths = {});
/// Four times as wide, through GELU.
Tensor widened(const Scope& s, Tensor x, int64_t width);

/// What attention over the tokens of both streams, modulated, gives each, projected back. s: of attention; positions
/// and lengths: as Block has them.
struct Attended {
  Tensor text, image;
};
Attended attend_jointly(const Scope& s, const Sizes& sizes, Tensor text, Tensor image, const nn::Rotary& positions,
                        Tensor lengths = {});

struct BlockNames {
  const char *image_modulation, *text_modulation, *image_feed_forward, *text_feed_forward;
};
/// What all blocks are given.
struct Block {
  Sizes sizes;
  BlockNames names;
  Tensor conditions;     // [B, D]
  nn::Rotary positions;  // of all tokens in their order in the sequence: the text's, then the image's
  Tensor lengths = {};   // s32 [B]: the image's tokens come first, and of the whole sequence this many are seen
};
/// streams: the text's and the image's → the same.
std::vector<Tensor> block(const Scope& s, const Block& b, const std::vector<Tensor>& streams);

/// norm_out, modulated by the conditions, and proj_out: [B, L, D] → [B, L, out], f32.
Tensor last_layer(const Scope& s, Tensor x, Tensor conditions, int64_t out, double eps = 1e-6, bool bias = true);

}  // namespace md::joint
