#include "maxdiffusion/models/joint_blocks.h"

#include <numeric>

#include "maxdiffusion/autodiff/named_values.h"
#include "maxdiffusion/base/error.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/models/config_reader.h"
#include "maxdiffusion/nn/attention.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/ops/sharding.h"

namespace md::joint {
namespace {

constexpr int64_t kMlpRatio = 4;
constexpr HeadNames kOfImage = {"to_q", "to_k", "to_v", "norm_q", "norm_k", value::kImgQkvProj},
                    kOfText = {"add_q_proj",   "add_k_proj",   "add_v_proj",
                               "norm_added_q", "norm_added_k", value::kTxtQkvProj};

/// f32.
Tensor modulated(const Scope& s, Tensor x, Tensor shift, Tensor scale, double eps) {
  return nn::layer_norm(s, f32(x), eps, false) * (scale + 1) + shift;
}

/// Adds the attention result, then the feed-forward network's, to one stream.
Tensor after_attention(const Scope& ff, int64_t width, Tensor x, Tensor attended, const std::vector<Modulation>& m) {
  auto path = ff.path_scope();
  x = gated(x, attended, m[0]);
  Tensor h = widened(ff / "net.0.proj", modulated(ff, x, m[1]), width);
  return gated(x, linear(ff / "net.2", h, width, axis::kMlp, axis::kEmbed), m[1]);
}

/// Modulations of a stream of `tokens`, the last of which may have their own conditions.
std::vector<Modulation> image_modulations(const Scope& s, const Block& b, int64_t tokens) {
  const int64_t width = b.sizes.width();
  if (!b.reference_conditions || b.references == 0) return modulations(s, b.conditions, width, 2);
  std::vector<Modulation> all = modulations(s, concatenate({b.conditions, b.reference_conditions}, 0), width, 2);
  HostArray last(Shape{DType::f32, {1, tokens, 1}});
  for (int64_t i = 0; i < tokens; ++i)
    last.mutable_view<float>()[static_cast<size_t>(i)] = i < tokens - b.references ? 0.0f : 1.0f;
  Tensor part = constant(s.graph(), last);
  for (Modulation& m : all)
    for (Tensor* x : {&m.shift, &m.scale, &m.gate}) {
      const std::vector<Tensor> halves = split(*x, 2, 0);
      *x = halves[0] * (1.0 - part) + halves[1] * part;
    }
  return all;
}

}  // namespace

void check_rotary_axes(const ConfigReader& r, const std::vector<int64_t>& dims, size_t count, int64_t head_dim) {
  check(dims.size() == count, Code::invalid_config, "{}: 'axes_dims_rope' has {} entries, expected {}", r.what(),
        dims.size(), count);
  for (int64_t v : dims)
    check(v >= 0 && v % 2 == 0, Code::invalid_config, "{}: 'axes_dims_rope' holds {}, expected even numbers", r.what(),
          v);
  const int64_t features = std::accumulate(dims.begin(), dims.end(), int64_t{0});
  check(features == head_dim, Code::invalid_config,
        "{}: the sum of 'axes_dims_rope' is {}, expected 'attention_head_dim' = {}", r.what(), features, head_dim);
}

Tensor f32(Tensor x) { return cast(x, DType::f32); }

Tensor linear(const Scope& s, Tensor x, int64_t out, const std::string& in_axis, const std::string& out_axis,
              bool bias) {
  return nn::linear(s, x, {.out = out, .bias = bias, .in_axis = in_axis, .out_axis = out_axis});
}

Tensor stream(Tensor x) { return shard(x, {axis::kBatch, axis::kLength, axis::kHeadsAct}); }

Tensor embedded_number(const Scope& s, Tensor number, int64_t width, int64_t sinusoids, bool bias) {
  return condition_mlp(s, nn::timestep_embedding(number, sinusoids, true, 0), width, bias);
}

Tensor condition_mlp(const Scope& s, Tensor x, int64_t width, bool bias) {
  Tensor h = silu(linear(s / "linear_1", x, width, axis::kEmbed, axis::kMlp, bias));
  return linear(s / "linear_2", h, width, axis::kMlp, axis::kEmbed, bias);
}

std::vector<Modulation> modulations(const Scope& s, Tensor conditions, int64_t width, int64_t uses, bool bias) {
  Tensor y = linear(s, conditions, 3 * uses * width, axis::kEmbed, axis::kMlp, bias);
  const std::vector<Tensor> parts = split(expand_dims(shard(f32(y), {axis::kBatch, ""}), 1), 3 * uses, 2);
  std::vector<Modulation> out;
  for (size_t i = 0; i < parts.size(); i += 3) out.push_back({parts[i], parts[i + 1], parts[i + 2]});
  return out;
}

Tensor modulated(const Scope& s, Tensor x, const Modulation& m, double eps) {
  return cast(modulated(s, x, m.shift, m.scale, eps), x.dtype());
}

Tensor gated(Tensor to, Tensor y, const Modulation& m) { return stream(cast(f32(to) + f32(y) * m.gate, to.dtype())); }

Heads heads_of(const Scope& s, const Sizes& sizes, Tensor x, const HeadNames& names) {
  auto project = [&](const char* name) {
    Tensor y = stream(linear(s / name, x, sizes.width(), axis::kEmbed, axis::kHeads, sizes.bias));
    return named(y, names.projected);
  };
  Tensor q = project(names.q), k = project(names.k);
  return heads_of(s, sizes, q, k, project(names.v), names);
}

Heads heads_of(const Scope& s, const Sizes& sizes, Tensor q, Tensor k, Tensor v, const HeadNames& names) {
  auto heads = [&](Tensor y) { return reshape(y, {y.dim(0), y.dim(1), sizes.heads, sizes.head_dim}); };
  auto normed = [&](const char* name, Tensor y) { return nn::rms_norm(s / name, heads(y), sizes.eps); };
  return {named(normed(names.norm_q, q), value::kQueryProj), named(normed(names.norm_k, k), value::kKeyProj),
          named(heads(v), value::kValueProj)};
}

Tensor attend(const Scope& s, const Heads& h, const nn::Rotary& positions, Tensor lengths) {
  AttentionOptions options = nn::attention_options(s, {.batch = axis::kBatch,
                                                       .length = axis::kLength,
                                                       .kv_length = axis::kKvLength,
                                                       .heads = axis::kHeadsAct,
                                                       .head_dim = axis::kKv});
  options.lengths = lengths;
  Tensor y = nn::self_attend(nn::rotated(h.q, positions), nn::rotated(h.k, positions), h.v, options);
  return stream(reshape(y, {y.dim(0), y.dim(1), y.dim(2) * y.dim(3)}));
}

Tensor widened(const Scope& s, Tensor x, int64_t width) {
  Tensor h = linear(s, x, kMlpRatio * width, axis::kEmbed, axis::kMlp);
  return named(gelu_tanh(shard(h, {axis::kBatch, axis::kLength, axis::kMlp})), value::kFfnActivation);
}

Attended attend_jointly(const Scope& s, const Sizes& sizes, Tensor text, Tensor image, const nn::Rotary& positions,
                        Tensor lengths) {
  const int64_t width = sizes.width(), text_tokens = text.dim(1), image_tokens = image.dim(1);
  const Heads i = heads_of(s, sizes, image, kOfImage), t = heads_of(s, sizes, text, kOfText);
  // Tokens that are not attended to must be last.
  const bool image_first = static_cast<bool>(lengths);
  auto joined = [&](Tensor x, Tensor y) { return image_first ? concatenate({y, x}, 1) : concatenate({x, y}, 1); };
  Tensor y = attend(s, {joined(t.q, i.q), joined(t.k, i.k), joined(t.v, i.v)}, positions, lengths);
  auto part = [&](int64_t first, int64_t tokens) { return slice_axis(y, 1, first, first + tokens); };
  auto back = [&](const char* name, Tensor x) {
    return linear(s / name, x, width, axis::kHeads, axis::kEmbed, sizes.bias);
  };
  Tensor to_image = back("to_out.0", part(image_first ? 0 : text_tokens, image_tokens));
  return {back("to_add_out", part(image_first ? image_tokens : 0, text_tokens)), to_image};
}

Tensor block_input(const Scope& s, const Block& b, Tensor image) {
  const Scope norm = s / b.names.image_modulation;
  image = stream(image);
  return modulated(norm, image, image_modulations(norm, b, image.dim(1))[0]);
}

std::vector<Tensor> block(const Scope& s, const Block& b, const std::vector<Tensor>& streams) {
  auto path = s.path_scope();
  Tensor text = stream(streams[0]), image = stream(streams[1]);
  const Scope image_scope = s / b.names.image_modulation, text_scope = s / b.names.text_modulation;
  const int64_t width = b.sizes.width();
  const std::vector<Modulation> of_image = image_modulations(image_scope, b, image.dim(1)),
                                of_text = modulations(text_scope, b.conditions, width, 2);
  Tensor image_in = modulated(image_scope, image, of_image[0]);
  const Attended y =
      attend_jointly(s / "attn", b.sizes, modulated(text_scope, text, of_text[0]), image_in, b.positions, b.lengths);
  return {after_attention(s / b.names.text_feed_forward, width, text, y.text, of_text),
          after_attention(s / b.names.image_feed_forward, width, image, y.image, of_image)};
}

Tensor last_layer(const Scope& s, Tensor x, Tensor conditions, int64_t out, double eps, bool bias) {
  Tensor m = linear(s / "norm_out.linear", conditions, 2 * x.dim(2), axis::kEmbed, axis::kMlp, bias);
  const std::vector<Tensor> parts = split(expand_dims(shard(f32(m), {axis::kBatch, ""}), 1), 2, 2);
  return linear(s / "proj_out", modulated(s / "norm_out", x, parts[1], parts[0], eps), out, axis::kEmbed, "", bias);
}

}  // namespace md::joint
