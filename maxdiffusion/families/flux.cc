// FLUX.1 dev and schnell: a transformer over pairs of rows and columns of an autoencoder's latents and over what T5
// makes of the text; CLIP's pooled text, the time and, in dev, the guidance that it was distilled with modulate its
// blocks. Sources: Black Forest Labs 2024 (FLUX.1); Esser et al. 2024, section 5.3.2 (shift by size); Meng et al. 2023
// (distilled guidance); details as in diffusers' pipeline.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kVae = "vae", *kClip = "text_encoder", *kT5 = "text_encoder_2",
                     *kIds = "ids", *kIds2 = "ids_2", *kPrompt = "prompt_embeds", *kPooled = "pooled_projections",
                     *kGuidance = "guidance";
constexpr int64_t kPatch = 2;  // rows and columns of latents in a token

/// [B, h, w, C] → [B, h/2·w/2, 4C]: of a token all rows and columns of the first channel, then of the next.
Tensor packed(Tensor x) {
  const int64_t b = x.dim(0), h = x.dim(1) / kPatch, w = x.dim(2) / kPatch, c = x.dim(3);
  x = transpose(reshape(x, {b, h, kPatch, w, kPatch, c}), {0, 1, 3, 5, 2, 4});
  return reshape(x, {b, h * w, c * kPatch * kPatch});
}

/// Undoes packed().
Tensor unpacked(Tensor x, int64_t rows, int64_t columns) {
  const int64_t b = x.dim(0), c = x.dim(2) / (kPatch * kPatch);
  x = transpose(reshape(x, {b, rows, columns, c, kPatch, kPatch}), {0, 1, 4, 2, 5, 3});
  return reshape(x, {b, rows * kPatch, columns * kPatch, c});
}

class Flux final : public Family {
 public:
  explicit Flux(const ModelFolder& folder)
      : folder_(folder),
        transformer_(folder.config<FluxTransformerConfig>(kTransformer)),
        vae_(folder.config<VaeConfig>(kVae)),
        clip_(folder.config<ClipTextConfig>(kClip)),
        t5_(folder.config<T5Config>(kT5)),
        length_(folder.option<int64_t>("max_sequence_length", 512)) {
    for (const char* tokenizer : {"tokenizer", "tokenizer_2"}) folder.require_tokenizer(tokenizer);
    const int64_t packed_channels = vae_.latent_channels * kPatch * kPatch;
    check(transformer_.in_channels == packed_channels && transformer_.patch_size == 1, Code::invalid_config,
          "the transformer takes tokens of {} channels in patches of {}; the autoencoder's latents make tokens of {}, "
          "in patches of 1: models that see pictures beside the latents are not supported",
          transformer_.in_channels, transformer_.patch_size, packed_channels);
    check(transformer_.joint_attention_dim == t5_.d_model, Code::invalid_config,
          "the transformer takes texts of {} features, the second text encoder gives {}",
          transformer_.joint_attention_dim, t5_.d_model);
    check(transformer_.pooled_projection_dim == clip_.hidden_size, Code::invalid_config,
          "the transformer takes pooled texts of {} features, the first text encoder gives {}",
          transformer_.pooled_projection_dim, clip_.hidden_size);
    check(length_ > 1, Code::invalid_config, "max_sequence_length is {}; expected 2 or more", length_);
  }

  std::string denoiser() const override { return kTransformer; }
  std::string autoencoder() const override { return kVae; }
  std::vector<std::string> text_encoders() const override { return {kClip, kT5}; }
  std::string axis_rules() const override { return kFluxAxisRules; }
  std::string kohya_version() const override { return "flux1"; }
  /// Of every block, feed-forward layers too, as diffusers' training programs have it.
  std::vector<std::string> lora_targets(const std::string& component) const override {
    if (component == kClip) return Family::lora_targets(component);
    if (component == kT5) return {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"};
    return {"attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
            "ff.net.0.proj",
            "ff.net.2",
            "ff_context.net.0.proj",
            "ff_context.net.2"};
  }
  SingleFile single_file() const override { return {.prefixes = {{kTransformer, ""}}}; }

  std::vector<Field> text_fields() const override {
    return {{kIds, {DType::s32, {clip_.max_position_embeddings}}}, {kIds2, {DType::s32, {length_}}}};
  }
  std::vector<std::string> second_text_fields() const override { return {kIds2}; }
  /// Only what T5 does not see is lost: CLIP's part of the text is pooled.
  HostArrays tokenize(const std::vector<std::string>& captions) const override {
    HostArrays out;
    for (const Field& field : text_fields()) {
      const bool first = field.name == kIds;
      const Tokenizer& tokenizer = folder_.tokenizer(first ? "tokenizer" : "tokenizer_2");
      const int64_t length = field.shape.dims[0];
      HostArray ids(batched(std::ssize(captions), field.shape));
      auto to = ids.mutable_view<int32_t>().begin();
      int64_t cut = 0;
      for (const std::string& caption : captions) {
        bool truncated = false;
        to = std::ranges::copy(tokenizer.encode(caption, length, &truncated), to).out;
        if (truncated && !first && ++cut == 1)
          log_warning("caption longer than {} tokens is cut: \"{}\"", length, shortened(caption));
      }
      if (cut > 1) log_warning("{} captions are longer than {} tokens and are cut", cut, length);
      out[field.name] = ids;
    }
    return out;
  }
  std::vector<Field> conditioning_fields() const override {
    return {{kPrompt, {DType::f32, {length_, t5_.d_model}}}, {kPooled, {DType::f32, {clip_.hidden_size}}}};
  }
  /// T5 sees the padding too, as when these models were trained. clip_skip is for CLIP's part, which is its pooled last
  /// layer, and so asks for what is not there.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const override {
    check(clip_skip == 0, Code::invalid_config, "clip_skip is {}, but these text encoders are used whole", clip_skip);
    return {{kPrompt, t5_encoder(models(kT5), t5_, text.at(kIds2))},
            {kPooled, cast(clip_text(models(kClip), clip_, text.at(kIds)).pooled, DType::f32)}};
  }

  Dims latent_dims(const MediaSize& size) const override {
    const int64_t multiple = size_multiple();
    auto nearest = [&](int64_t n) { return std::max<int64_t>((n + multiple / 2) / multiple, 1) * multiple; };
    check(size.height > 0 && size.width > 0 && size.height % multiple == 0 && size.width % multiple == 0,
          Code::invalid_config, "size {}x{} is not a multiple of {}, as this model needs; the nearest is {}x{}",
          size.height, size.width, multiple, nearest(size.height), nearest(size.width));
    check(size.frames == 1, Code::invalid_config, "{} frames are asked for; this model draws pictures", size.frames);
    return {size.height / downscale(), size.width / downscale(), vae_.latent_channels};
  }
  int64_t downscale() const override { return vae_.downscale(); }
  int64_t size_multiple() const override { return downscale() * kPatch; }
  int64_t decoder_tile() const override { return vae_.sample_size / vae_.downscale(); }
  Posterior encode_media(const Models& models, Tensor pixels) const override {
    return vae_encode(models(kVae), vae_, pixels);
  }
  Tensor decode_media(const Models& models, Tensor latents) const override {
    return cast(vae_decode(models(kVae), vae_, latents), DType::f32);
  }
  LatentScale latent_scale() const override { return {{vae_.shift_factor}, {vae_.scaling_factor}}; }
  nlohmann::json fitted_autoencoder(nlohmann::json config, const EachMoments& each) const override {
    const Spread spread = spread_of(each);
    config["shift_factor"] = spread.mean;
    config["scaling_factor"] = 1 / spread.deviation;
    log_info("autoencoder: shift_factor {:.5f}, scaling_factor {:.5f}", spread.mean, 1 / spread.deviation);
    return config;
  }

  Tensor denoise(const Models& models, Tensor x, Tensor t, const Conditioning& c) const override {
    const int64_t rows = x.dim(1) / kPatch, columns = x.dim(2) / kPatch;
    FluxInputs in{.sample = packed(x),
                  .rows = rows,
                  .columns = columns,
                  .timestep = cast(t, DType::f32),
                  .text = c.at(kPrompt),
                  .pooled = c.at(kPooled)};
    if (transformer_.guidance_embeds) in.guidance = c.at(kGuidance);
    return unpacked(flux_transformer(models(kTransformer), transformer_, in), rows, columns);
  }
  bool distilled_guidance() const override { return true; }
  Conditioning guidance_conditioning(Graph& g, int64_t batch, double scale) const override {
    if (!transformer_.guidance_embeds) return {};
    return {{kGuidance, full(g, scale, {DType::f32, {batch}})}};
  }

  /// Levels go from 1 to 1/n in n even steps, and are then shifted; with use_dynamic_shifting by e^μ (linear: by μ),
  /// where μ grows with the number of tokens.
  nlohmann::json sampler_config(nlohmann::json config, const MediaSize& size) const override {
    if (config.value("_class_name", std::string()).ends_with("FlowMatchEulerDiscreteScheduler"))
      config["timestep_spacing"] = "trailing";
    if (!config.value("use_dynamic_shifting", false)) return config;
    auto number = [&](const char* name, double fallback) {
      const auto found = config.find(name);
      return found == config.end() || found->is_null() ? fallback : found->get<double>();
    };
    const Dims latent = latent_dims(size);
    const int64_t rows = latent[0] / kPatch, columns = latent[1] / kPatch;
    const auto tokens = static_cast<double>(rows * columns);
    const double least = number("base_image_seq_len", 256), most = number("max_image_seq_len", 4096),
                 low = number("base_shift", 0.5), high = number("max_shift", 1.15);
    check(least < most, Code::invalid_config, "scheduler config: base_image_seq_len is {}, max_image_seq_len {}", least,
          most);
    const double mu = low + (high - low) * (tokens - least) / (most - least);
    const bool linear = config.value("time_shift_type", std::string("exponential")) == "linear";
    config["shift"] = config["flow_shift"] = linear ? mu : std::exp(mu);
    config["use_dynamic_shifting"] = false;
    return config;
  }

  std::vector<std::string> model_names() const override {
    return {transformer_.guidance_embeds ? "flux-dev" : "flux-schnell"};
  }
  std::vector<std::string> model_types() const override { return {"T2I"}; }
  std::string file_prefix(uint64_t) const override { return "flux_"; }

  // What MaxDiffusion's trainer reads: a packed latent, scaled; text_embeds are T5's, prompt_embeds CLIP's; positions
  // of the text (zeros) and of the latent's tokens: 0, row, column.
  std::vector<std::string> encoded_columns() const override {
    return {"pixel_values", "text_embeds", "prompt_embeds", "img_ids"};
  }
  HostArrays from_encoded(const HostArrays& records) const override {
    const HostArray tokens = records.at("pixel_values").cast(DType::f32),
                    positions = records.at("img_ids").cast(DType::f32);
    const Dims &d = tokens.dims(), &p = positions.dims();
    const int64_t c = vae_.latent_channels;
    check(d.size() == 3 && d[2] == c * kPatch * kPatch && p.size() == 3 && p[1] == d[1] && p[2] == 3 && d[1] > 0,
          Code::io, "pixel_values of records are {}, img_ids {}; expected [tokens, {}] and [tokens, 3]",
          to_string(tokens.shape()), to_string(positions.shape()), c * kPatch * kPatch);
    // The last token of a picture lies in its last row and column.
    const auto last = positions.view<float>().subspan(static_cast<size_t>(d[1] * 3 - 2), 2);
    const int64_t rows = std::llround(last[0]) + 1, columns = std::llround(last[1]) + 1;
    check(rows > 0 && columns > 0 && rows * columns == d[1], Code::io,
          "img_ids of records end with row {} and column {}, which are not those of {} tokens", last[0], last[1], d[1]);
    const HostArray latents = with_axes(tokens.reshaped({d[0], rows, columns, c, kPatch, kPatch}), {0, 1, 4, 2, 5, 3});
    return {{"latents", latents.reshaped({d[0], rows * kPatch, columns * kPatch, c})},
            {kPrompt, records.at("text_embeds").cast(DType::f32)},
            {kPooled, records.at("prompt_embeds").cast(DType::f32)}};
  }
  HostArrays to_encoded(const HostArray& moments, const HostArrays&, const HostArrays& conditioning,
                        const std::function<std::vector<float>(size_t)>& noise) const override {
    const HostArray z = latent_scale().apply(drawn_latent(moments, noise));
    const int64_t rows = z.dims()[1] / kPatch, columns = z.dims()[2] / kPatch, c = vae_.latent_channels;
    HostArray positions(Shape{DType::f32, {rows * columns, 3}});
    auto to = positions.mutable_view<float>().begin();
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t column = 0; column < columns; ++column)
        for (const int64_t v : {int64_t{0}, row, column}) *to++ = static_cast<float>(v);
    const HostArray tokens = with_axes(z.reshaped({rows, kPatch, columns, kPatch, c}), {0, 2, 4, 1, 3});
    const HostArray& text = conditioning.at(kPrompt);
    return {{"pixel_values", tokens.reshaped({rows * columns, c * kPatch * kPatch}).cast(DType::bf16)},
            {"input_ids", zeros_as(HostArray(Shape{DType::bf16, {text.dims()[0], 3}}))},
            {"text_embeds", text},
            {"prompt_embeds", conditioning.at(kPooled)},
            {"img_ids", positions}};
  }

 private:
  ModelFolder folder_;
  FluxTransformerConfig transformer_;
  VaeConfig vae_;
  ClipTextConfig clip_;
  T5Config t5_;
  int64_t length_;
};

}  // namespace

std::shared_ptr<const Family> make_flux(const ModelFolder& folder) { return std::make_shared<Flux>(folder); }

}  // namespace md
