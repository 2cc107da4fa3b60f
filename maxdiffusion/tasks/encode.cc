#include "maxdiffusion/tasks/encode.h"

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/tiles.h"

namespace md {

TextConditioning text_conditioning(const ModelFolder& m, const Scope& encoder, Tensor ids, const Scope* encoder_2,
                                   Tensor ids_2, int64_t clip_skip) {
  ClipTextOutput first = clip_text(encoder, m.text_encoder, ids, encoder_2 ? 0 : clip_skip);
  TextConditioning c;
  if (!encoder_2) {
    c.prompt_embeds = cast(first.last_hidden_state, DType::f32);
    if (clip_skip > 0) c.skipped = cast(first.skipped, DType::f32);
    return c;
  }
  ClipTextOutput second = clip_text(*encoder_2, *m.text_encoder_2, ids_2);
  auto both = [&](int64_t skip) {
    auto before_last = [skip](const ClipTextOutput& o) {
      const int64_t layers = static_cast<int64_t>(o.hidden_states.size()) - 1;
      check(skip >= 0 && skip < layers, Code::invalid_config,
            "clip_skip is {}; expected 0 to {}, one less than the layers of the text encoder", skip, layers - 1);
      return o.hidden_states[static_cast<size_t>(layers - 1 - skip)];
    };
    return cast(concatenate({before_last(first), before_last(second)}, -1), DType::f32);
  };
  c.prompt_embeds = both(0);
  if (clip_skip > 0) c.skipped = both(clip_skip);
  c.text_embeds = cast(second.text_embeds, DType::f32);
  return c;
}

ScopeOptions companion(ScopeOptions scope) {
  scope.weights = scope.activations = DType::f32;
  scope.trainable = false;
  return scope;
}

TextEncoder::TextEncoder(const Devices& devices, const ModelFolder& m, int64_t batch, const WeightsOf& weights,
                         const ScopeOptions& scope, const CompileConfig& compile_config, int64_t clip_skip)
    : devices_(devices),
      model_(m),
      batch_(batch),
      length_(m.text_encoder.max_position_embeddings),
      clip_skip_(clip_skip) {
  Graph g(devices.graph_options(&devices.rules()));
  ParamTable params;
  Scope first(g, params, "text_encoder", companion(scope));
  const LogicalAxes axes = {axis::kData, ""};
  Tensor ids = g.input("ids", {DType::s32, {batch, length_}}, axes), ids_2;
  std::optional<Scope> second;
  if (m.text_encoder_2) {
    second.emplace(g, params, "text_encoder_2", companion(scope));
    ids_2 = g.input("ids_2", {DType::s32, {batch, length_}}, axes);
  }
  TextConditioning c = text_conditioning(m, first, ids, second ? &*second : nullptr, ids_2, clip_skip);
  g.output("prompt_embeds", c.prompt_embeds);
  if (clip_skip > 0) g.output("skipped", c.skipped);
  if (second) g.output("text_embeds", c.text_embeds);
  program_ = std::make_unique<Program>(compile(devices, g, compile_config, "text_encoder"));
  for (const char* component : {"text_encoder", "text_encoder_2"}) {
    auto values = weights(params, component);
    if (values.empty()) continue;
    place(devices, *program_, values, arrays_);
    weights_[component] = published(params, component, values);
  }
}

HostArray TextEncoder::ids(const ClipTokenizer& tokenizer, const std::vector<std::string>& captions,
                           size_t from) const {
  HostArray out(Shape{DType::s32, {batch_, length_}});
  auto v = out.mutable_view<int32_t>();
  for (int64_t i = 0; i < batch_; ++i) {
    bool truncated = false;
    const size_t k = std::min(from + static_cast<size_t>(i), captions.size() - 1);
    std::vector<int32_t> row = tokenizer.encode(captions[k], length_, &truncated);
    if (truncated && k == from + static_cast<size_t>(i))
      log_warning("caption longer than {} tokens is cut: \"{}\"", length_, captions[k].substr(0, 60));
    std::copy(row.begin(), row.end(), v.begin() + i * length_);
  }
  return out;
}

TextEmbeddings TextEncoder::encode(const std::vector<std::string>& captions, bool whole) {
  TextEmbeddings out;
  const int64_t n = static_cast<int64_t>(captions.size());
  auto keep = [n](HostArray& whole, int64_t from, const HostArray& part) {
    if (!whole) {
      Dims dims = part.dims();
      dims[0] = n;
      whole = HostArray(Shape{part.dtype(), dims});
    }
    set_rows(whole, from, part);
  };
  for (int64_t from = 0; from < n; from += batch_) {
    HostArrays in = {{"ids", ids(*model_.tokenizer, captions, static_cast<size_t>(from))}};
    if (model_.tokenizer_2) in["ids_2"] = ids(*model_.tokenizer_2, captions, static_cast<size_t>(from));
    ArrayMap feed;
    place(devices_, *program_, in, feed);
    ArrayMap result = program_->run(feed, arrays_);
    keep(out.prompt_embeds, from, devices_.get(result.at(clip_skip_ > 0 && !whole ? "skipped" : "prompt_embeds")));
    if (result.contains("text_embeds")) keep(out.text_embeds, from, devices_.get(result.at("text_embeds")));
  }
  return out;
}

PictureCoder::PictureCoder(const Devices& devices, const VaeConfig& vae, HostArrays weights, int64_t batch,
                           const ScopeOptions& scope, const CompileConfig& compile_config)
    : devices_(devices),
      vae_(vae),
      weights_(std::move(weights)),
      batch_(batch),
      scope_(companion(scope)),
      compile_(compile_config) {}

HostArray PictureCoder::run(Half& half, const HostArray& input, const char* name,
                            Tensor (*build)(const Scope&, const VaeConfig&, Tensor)) {
  Shape shape = input.shape();
  const int64_t n = shape.dims[0];
  shape.dims[0] = batch_;
  if (!half.program || half.input != shape) {
    Graph g(devices_.graph_options(&devices_.rules()));
    ParamTable params;
    Scope s(g, params, "vae", scope_);
    g.output("out", build(s, vae_, g.input("in", shape, {axis::kData, "", "", ""})));
    half = {shape, std::make_unique<Program>(compile(devices_, g, compile_, name)), {}};
    place(devices_, *half.program, weights_, half.weights);
  }
  HostArray whole;
  for (int64_t from = 0; from < n; from += batch_) {
    HostArrays in = {{"in", rows(input, from, batch_)}};
    ArrayMap feed;
    place(devices_, *half.program, in, feed);
    HostArray part = devices_.get(half.program->run(feed, half.weights).at("out"));
    if (!whole) {
      Dims dims = part.dims();
      dims[0] = n;
      whole = HostArray(Shape{part.dtype(), dims});
    }
    set_rows(whole, from, part);
  }
  return whole;
}

HostArray PictureCoder::encode(const HostArray& pixels) {
  return run(encoder_, pixels, "vae_encoder", [](const Scope& s, const VaeConfig& vae, Tensor x) {
    Posterior q = vae_encode(s, vae, pixels_to_float(x));
    return concatenate({q.mean, exp(q.logvar * 0.5)}, -1);
  });
}

HostArray PictureCoder::decode(const HostArray& latents, bool tiled) {
  const int64_t tile = vae_.sample_size / vae_.downscale();
  if (tiled && tile > 0 && std::max(latents.dims()[1], latents.dims()[2]) > tile)
    return decode_in_tiles(latents, tile, vae_.downscale(), [this](const HostArray& part) { return decode(part); });
  return run(decoder_, latents, "vae_decoder",
             [](const Scope& s, const VaeConfig& vae, Tensor z) { return cast(vae_decode(s, vae, z), DType::f32); });
}

ParamTable denoiser_params(const ModelFolder& m) {
  Graph g;
  ParamTable params;
  auto trace_text = [&](const char* component, const ClipTextConfig& config) {
    clip_text(Scope(g, params, component), config, full(g, 0, {DType::s32, {1, 1}}));
  };
  trace_text("text_encoder", m.text_encoder);
  if (m.text_encoder_2) trace_text("text_encoder_2", *m.text_encoder_2);
  const UNetConfig& c = m.unet;
  auto zeros = [&](Dims dims) { return full(g, 0, {DType::f32, std::move(dims)}); };
  const int64_t side = int64_t{1} << (c.block_out_channels.size() - 1);
  UNetInputs in{.sample = zeros({1, side, side, c.in_channels}),
                .timestep = zeros({1}),
                .encoder_hidden_states = zeros({1, 1, c.cross_attention_dim[0]})};
  if (c.addition_embed_type) {
    in.text_embeds = zeros({1, c.projection_class_embeddings_input_dim - 6 * c.addition_time_embed_dim});
    in.time_ids = zeros({1, 6});
  }
  if (c.time_cond_proj_dim) in.timestep_cond = zeros({1, *c.time_cond_proj_dim});
  unet2d(Scope(g, params, "unet"), c, in);
  return params;
}

ParamTable vae_params(const ModelFolder& m, DType weights) {
  Graph g;
  ParamTable params;
  Scope s(g, params, "vae", {.weights = weights});
  const int64_t side = m.vae.downscale();
  Posterior q = vae_encode(s, m.vae, full(g, 0, {DType::f32, {1, side, side, m.vae.in_channels}}));
  vae_decode(s, m.vae, q.mean);
  return params;
}

}  // namespace md
