#include "maxdiffusion/models/unet2d.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/models/resnet_block.h"
#include "maxdiffusion/models/step_reuse.h"
#include "maxdiffusion/models/transformer2d.h"
#include "maxdiffusion/ops/dot.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Inputs of every block: the time embedding after its activation [B, T], the text [B, L, D], its rows that are tokens
/// s32 [B] (absent: all), and attention to an image.
struct Conditioning {
  Tensor temb, text, text_rows;
  std::function<Tensor(const std::string&, Tensor)> image_attention = {};
};

ResnetOptions resnet_options(const UNetConfig& c, int64_t out) {
  return {.out = out, .groups = c.norm_num_groups, .eps = c.norm_eps, .act = c.act_fn};
}

Tensor resnet(const Scope& s, Tensor x, const Conditioning& cond, const ResnetOptions& o) {
  return nn::remat(
      s, [&](Tensor y) { return resnet_block(s, y, cond.temb, o); }, x);
}

/// The transformer of level `level`, counted from the finest. The mid block's always has self-attention, as in
/// diffusers.
Tensor local_attention(const Scope& s, Tensor x, const Conditioning& cond, const UNetConfig& c, size_t level,
                       bool mid = false) {
  check(cond.text.dim(-1) == c.cross_attention_dim[level], Code::invalid_graph,
        "unet: encoder_hidden_states is {}, level {} expects cross_attention_dim {}", to_string(cond.text.shape()),
        level, c.cross_attention_dim[level]);
  return transformer2d(s, x, cond.text,
                       {.heads = c.num_heads[level],
                        .layers = c.transformer_layers_per_block[level],
                        .groups = c.norm_num_groups,
                        .linear_projection = c.use_linear_projection,
                        .only_cross_attention = c.only_cross_attention[level] && !mid,
                        .upcast_attention = c.upcast_attention,
                        .context_rows = cond.text_rows,
                        .image_attention = cond.image_attention});
}

/// [B, T] f32: the input of resnets, before its activation.
Tensor time_embedding(const Scope& s, const UNetConfig& c, const UNetInputs& in) {
  const int64_t width = 4 * c.block_out_channels[0];
  Tensor t = nn::timestep_embedding(in.timestep, c.block_out_channels[0], c.flip_sin_to_cos, c.freq_shift);
  if (c.time_cond_proj_dim) {
    check(static_cast<bool>(in.timestep_cond), Code::invalid_graph,
          "unet: time_cond_proj_dim is {} in this config, but no timestep_cond is given", *c.time_cond_proj_dim);
    t = t + nn::linear(s / "time_embedding.cond_proj", cast(in.timestep_cond, DType::f32),
                       {.out = c.block_out_channels[0], .bias = false});
  }
  Tensor temb = nn::timestep_mlp(s / "time_embedding", t, width, c.act_fn);
  if (!c.addition_embed_type) return temb;

  check(in.text_embeds && in.time_ids, Code::invalid_graph,
        "unet: addition_embed_type is text_time in this config, so text_embeds and time_ids are needed");
  const int64_t batch = in.time_ids.dim(0), ids = in.time_ids.dim(1);
  Tensor sizes = nn::timestep_embedding(reshape(in.time_ids, {batch * ids}), c.addition_time_embed_dim,
                                        c.flip_sin_to_cos, c.freq_shift);
  sizes = reshape(sizes, {batch, ids * c.addition_time_embed_dim});
  Tensor both = concatenate({cast(in.text_embeds, DType::f32), sizes}, 1);
  check(both.dim(1) == c.projection_class_embeddings_input_dim, Code::invalid_graph,
        "unet: text_embeds {} and {} time ids of {} make {} features, projection_class_embeddings_input_dim is {}",
        to_string(in.text_embeds.shape()), ids, c.addition_time_embed_dim, both.dim(1),
        c.projection_class_embeddings_input_dim);
  return temb + nn::timestep_mlp(s / "add_embedding", both, width);
}

void add_residuals(std::vector<Tensor>& skips, const std::vector<Tensor>& residuals) {
  if (residuals.empty()) return;
  check(residuals.size() == skips.size(), Code::invalid_graph, "unet: {} down_residuals for {} skips", residuals.size(),
        skips.size());
  for (size_t i = 0; i < skips.size(); ++i) skips[i] = skips[i] + cast(residuals[i], skips[i].dtype());
}

/// Appends the outputs of each resnet (with its attention) and each downsampler to `skips`. `features` are added in
/// blocks with attention before the downsampler, in others after it, as in diffusers. Ends when there are `most` skips.
Tensor down_path(const Scope& s, const UNetConfig& c, Tensor h, const Conditioning& cond, std::vector<Tensor>& skips,
                 const std::vector<Tensor>& features, size_t most) {
  const auto add_feature = [&](size_t level) {
    if (level >= features.size()) return;
    check(features[level].dims() == h.dims(), Code::invalid_config,
          "t2i_adapter: its features {} are {}; this UNet's are {}: it is for another model", level + 1,
          to_string(features[level].shape()), to_string(h.shape()));
    h = h + cast(features[level], h.dtype());
    skips.back() = h;
  };
  const size_t levels = c.block_out_channels.size();
  for (size_t level = 0; level < levels; ++level) {
    const Scope block = s / fmt::format("down_blocks.{}", level);
    const bool attention = c.down_block_types[level] == "CrossAttnDownBlock2D";
    for (int64_t i = 0; i < c.layers_per_block[level]; ++i) {
      if (skips.size() == most) return h;
      h = resnet(block / "resnets" / i, h, cond, resnet_options(c, c.block_out_channels[level]));
      if (attention) h = local_attention(block / "attentions" / i, h, cond, c, level);
      skips.push_back(h);
    }
    if (attention) add_feature(level);
    if (skips.size() == most) return h;
    if (level + 1 < levels) {
      h = downsample(block, h, c.downsample_padding, true);
      skips.push_back(h);
    }
    if (!attention) add_feature(level);
  }
  return h;
}

Tensor mid_path(const Scope& s, const UNetConfig& c, Tensor h, const Conditioning& cond) {
  if (!c.mid_block_type) return h;
  ResnetOptions o = resnet_options(c, h.dim(-1));
  o.scale_factor = c.mid_block_scale_factor;
  h = resnet(s / "mid_block.resnets.0", h, cond, o);
  if (*c.mid_block_type == "UNetMidBlock2D") return h;
  h = local_attention(s / "mid_block.attentions.0", h, cond, c, c.block_out_channels.size() - 1, true);
  return resnet(s / "mid_block.resnets.1", h, cond, o);
}

/// Multiplies the frequencies 0 and −1 of rows and columns by `scale` and returns the real part.   x: [B, H, W, C].
Tensor low_frequencies_scaled(Tensor x, double scale) {
  const int64_t h = x.dim(1), w = x.dim(2);
  if (h < 2 || w < 2) return x;  // as in diffusers, whose window is then empty
  enum Part { cosine, sine };
  auto matrix = [&](int64_t n, Part part) {
    HostArray m(Shape{DType::f32, {n, n}});
    for (int64_t i = 0; i < n * n; ++i) {
      const int64_t row = i / n, column = i % n;
      const double angle = 2 * std::numbers::pi * static_cast<double>(row - column) / static_cast<double>(n);
      m.mutable_view<float>()[static_cast<size_t>(i)] =
          static_cast<float>((part == cosine ? 1 + std::cos(angle) : std::sin(angle)) / static_cast<double>(n));
    }
    return constant(x.graph(), m);
  };
  auto both = [&](Part part) {
    Tensor y = dot(cast(x, DType::f32), matrix(h, part), {.lhs_contract = {1}, .rhs_contract = {1}});  // [B, W, C, H]
    y = dot(y, matrix(w, part), {.lhs_contract = {1}, .rhs_contract = {1}});                           // [B, C, H, W]
    return transpose(y, {0, 2, 3, 1});
  };
  return cast(cast(x, DType::f32) + (both(cosine) - both(sine)) * (scale - 1), x.dtype());
}

/// Applies FreeU at up block `i` to the previous block's output and the skip connection.
void apply_freeu(const std::array<double, 4>& freeu, size_t i, Tensor& h, Tensor& skip) {
  if (i > 1) return;
  const int64_t half = h.dim(-1) / 2;
  h = concatenate({slice_axis(h, 3, 0, half) * freeu[2 + i], slice_axis(h, 3, half, h.dim(-1))}, -1);
  skip = low_frequencies_scaled(skip, freeu[i]);
}

/// h: the mid block's output, or the reused features that enter the last skips.size() resnets. With `reuse`, its arrays
/// become the features that enter the last branch + 1 resnets.
Tensor up_path(const Scope& s, const UNetConfig& c, Tensor h, const Conditioning& cond, std::vector<Tensor> skips,
               const std::optional<std::array<double, 4>>& freeu, StepReuse* reuse) {
  const size_t levels = c.block_out_channels.size();
  auto left = static_cast<size_t>(c.up_layers());  // resnets that are to come
  for (size_t i = 0; i < levels; ++i) {
    const size_t level = levels - 1 - i;
    const Scope block = s / fmt::format("up_blocks.{}", i);
    const bool attention = c.up_block_types[i] == "CrossAttnUpBlock2D";
    bool runs = false;
    for (int64_t k = 0; k < c.layers_per_block[level] + 1; ++k, --left) {
      if (left > skips.size()) continue;
      runs = true;
      if (reuse && left == static_cast<size_t>(reuse->branch) + 1) reuse->arrays = {h};
      if (freeu) apply_freeu(*freeu, i, h, skips.back());
      h = concatenate({h, skips.back()}, -1);
      skips.pop_back();
      h = resnet(block / "resnets" / k, h, cond, resnet_options(c, c.block_out_channels[level]));
      if (attention) h = local_attention(block / "attentions" / k, h, cond, c, level);
    }
    if (runs && level > 0) h = upsample(block, h, skips.back().dim(1), skips.back().dim(2), true);
  }
  return h;
}

}  // namespace

int64_t UNetConfig::up_layers() const {
  return std::accumulate(layers_per_block.begin(), layers_per_block.end(), std::ssize(layers_per_block));
}

UNetFeatures unet2d_features(const Scope& s, const UNetConfig& c, const UNetInputs& in, Tensor hint, size_t skips) {
  check(in.sample && in.sample.rank() == 4 && in.sample.dim(-1) == c.in_channels, Code::invalid_graph,
        "unet: sample is {}, expected [B, H, W, {}]", in.sample ? to_string(in.sample.shape()) : "absent",
        c.in_channels);
  UNetFeatures f;
  f.temb = cast(nn::activation(c.act_fn, time_embedding(s, c, in)), s.dtype());
  f.text = cast(in.encoder_hidden_states, s.dtype());
  const Conditioning cond{f.temb, f.text, in.text_rows, in.image_attention};
  Tensor h = annotated_conv(s / "conv_in", cast(in.sample, s.dtype()), {.out = c.block_out_channels[0]}, true);
  if (hint) h = h + cast(hint, h.dtype());
  f.skips = {h};
  h = down_path(s, c, h, cond, f.skips, in.adapter_features, skips);
  if (skips > 0) return f;
  f.mid = mid_path(s, c, h, cond);
  if (const size_t down = c.block_out_channels.size();
      in.adapter_features.size() > down && in.adapter_features[down].dims() == f.mid.dims())
    f.mid = f.mid + cast(in.adapter_features[down], f.mid.dtype());
  return f;
}

Tensor unet2d(const Scope& s, const UNetConfig& c, const UNetInputs& in) {
  auto path = s.path_scope();
  const bool reused = in.reuse && !in.reuse->arrays.empty();
  if (in.reuse)
    check(in.reuse->of == StepReuse::Of::deep_levels && in.reuse->branch >= 0 && in.reuse->branch + 1 < c.up_layers() &&
              in.down_residuals.empty(),
          Code::invalid_graph, "unet: branch {} of {} skip connections is reused, {} residuals", in.reuse->branch,
          c.up_layers(), in.down_residuals.size());
  UNetFeatures f = unet2d_features(s, c, in, {}, reused ? static_cast<size_t>(in.reuse->branch) + 1 : 0);
  add_residuals(f.skips, in.down_residuals);
  Tensor h = reused ? cast(in.reuse->arrays[0], s.dtype()) : f.mid;
  if (in.mid_residual) h = h + cast(in.mid_residual, h.dtype());
  h = up_path(s, c, h, {f.temb, f.text, in.text_rows, in.image_attention}, std::move(f.skips), in.freeu, in.reuse);
  h = cast(h, DType::f32);
  h = nn::group_norm(s / "conv_norm_out", h, c.norm_num_groups, c.norm_eps, c.act_fn);
  return annotated_conv(s / "conv_out", h, {.out = c.out_channels}, false);
}

UNetInputs smallest_unet_inputs(Graph& g, const UNetConfig& c) {
  auto zeros = [&](Dims dims) { return full(g, 0, {DType::f32, std::move(dims)}); };
  const int64_t side = int64_t{1} << (c.block_out_channels.size() - 1);
  UNetInputs in{.sample = zeros({1, side, side, c.in_channels}),
                .timestep = zeros({1}),
                .encoder_hidden_states = zeros({1, 1, c.cross_attention_dim[0]})};
  if (c.addition_embed_type) {
    in.text_embeds = zeros({1, c.pooled_width()});
    in.time_ids = zeros({1, 6});
  }
  if (c.time_cond_proj_dim) in.timestep_cond = zeros({1, *c.time_cond_proj_dim});
  return in;
}

void trace_unet2d(const Scope& s, const UNetConfig& c) { unet2d(s, c, smallest_unet_inputs(s.graph(), c)); }

}  // namespace md
