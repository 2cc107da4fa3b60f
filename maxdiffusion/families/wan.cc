// Wan 2.1 and 2.2: a transformer over the latents of a causal video autoencoder, conditioned on UMT5's encoding of the
// text. The folder's components determine the model: two transformers for different noise levels (2.2 A14B), a timestep
// for every token (TI2V-5B). Sources: Wan Team 2025; details as in diffusers' pipelines of the same models.
#include <fmt/format.h>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/wan_ratios.h"
#include "maxdiffusion/media/image_processor.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/tokenizers/clean_text.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kSecond = "transformer_2", *kVae = "vae", *kText = "text_encoder",
                     *kVision = "image_encoder", *kProcessor = "image_processor/preprocessor_config.json",
                     *kIds = "ids", *kMask = "mask", *kPrompt = "prompt_embeds", *kCondition = "condition",
                     *kImage = "image_embeds", *kContext[] = {"text_keys", "text_values", "image_keys", "image_values"};

std::vector<std::string> self_attentions(int64_t blocks) {
  std::vector<std::string> all;
  for (int64_t i = 0; i < blocks; ++i) all.push_back(fmt::format("blocks.{}.attn1", i));
  return all;
}

FamilySpec wan_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<WanTransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder(kVae, true);
  const auto& text = folder.config<T5Config>(kText);
  const auto length = folder.option<int64_t>("max_sequence_length", 512);
  const bool two = folder.has(kSecond);
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {{.component = kText,
                         .tokenizer = folder.tokenizer("tokenizer"),
                         .ids = kIds,
                         .mask = kMask,
                         .max_tokens = length,
                         .prepare = [](const std::string& caption) { return clean_text(caption); },
                         .lora_targets = kT5LoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, text.d_model}}}},
      .zero_text_padding = true,
      .patch = std::max(transformer.patch_size[1], transformer.patch_size[2]),
      .frame_patch = transformer.patch_size[0],
      .default_frames = 1 + 20 * vae->frame_scale,
      .sample_defaults = {.height = 480, .width = 832},
      .magcache_ratios =
          [transformer, two](const MediaSize& size, bool images) {
            return wan_magcache_ratios(transformer, {.two_transformers = two, .image = images, .height = size.height});
          },
      .teacache_coefficients =
          [transformer, two](const MediaSize& size, bool images) {
            return wan_teacache_coefficients(transformer,
                                             {.two_transformers = two, .image = images, .height = size.height});
          },
      .self_attentions = self_attentions(transformer.num_layers),
      .blocks = "blocks",
      .block_count = transformer.num_layers,
      .axis_rules = kWanAxisRules,
      // All blocks, including feed-forward layers, as in most trainers.
      .lora = {.targets = {"to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"}, .original_names = true},
      .single_file = {.prefixes = {{kTransformer, ""}}},
      .records = wan_records(),
      .reference = reference_conventions(folder)};
  if (two) {
    spec.denoisers.emplace_back(kSecond);
    spec.boundary_ratio = folder.option("boundary_ratio", 0.875);
  }
  const int64_t with_image = 2 * vae->channels + vae->frame_scale;
  check(transformer.in_channels == vae->channels || transformer.in_channels == with_image, Code::invalid_config,
        "transformer: in_channels is {}; expected {}, the autoencoder's latent channels, or {}, with an image and its "
        "mask",
        transformer.in_channels, vae->channels, with_image);
  check(transformer.text_dim == text.d_model, Code::invalid_config,
        "transformer: text_dim is {}; expected {}, the width of text_encoder", transformer.text_dim, text.d_model);
  check(length > 1, Code::invalid_config, "max_sequence_length is {}; expected 2 or more", length);
  return spec;
}

/// Wan 2.1: the image encoder encodes the image, the autoencoder a video that is grey except for the image, and a mask
/// marks known frames. Wan 2.2 has no image encoder. TI2V-5B: the first frame's latents are the image's, at timestep 0.
class WanImages final : public ImageConditioning {
 public:
  WanImages(const ModelFolder& folder, std::shared_ptr<const Autoencoder> autoencoder, bool first_frame)
      : autoencoder_(std::move(autoencoder)), first_frame_(first_frame) {
    const auto& transformer = folder.config<WanTransformerConfig>(kTransformer);
    if (transformer.in_channels != autoencoder_->channels) masks_ = autoencoder_->frame_scale;
    if (transformer.image_dim) {
      vision_ = folder.config<ClipVisionConfig>(kVision);
      processor_ = ImageProcessor::from_json(parse_json(folder.files().at(kProcessor)));
      encoder = kVision;
    }
    if (first_frame) return;
    min_images = transformer.pos_embed_seq_len ? 2 : 1;
    max_images = vision_ ? min_images : 2;
  }

  std::vector<Field> fields(const MediaSize& size) const override {
    Dims dims = autoencoder_->latent_dims(size);
    if (first_frame_) dims[0] = 1;
    dims.back() += masks_;
    std::vector<Field> fields = {{kCondition, {DType::f32, dims}}};
    if (vision_) fields.push_back({kImage, {DType::f32, {min_images * vision_->tokens(), vision_->hidden_size}}});
    return fields;
  }
  HostArray prepare(const std::vector<HostArray>& images) const override {
    HostArray all;
    for (size_t i = 0; i < images.size(); ++i) {
      const HostArray one = processor_.apply(images[i]);
      add_rows(all, std::ssize(images), static_cast<int64_t>(i), one.reshaped(batched(1, one.shape()).dims));
    }
    return all;
  }
  Conditioning encode(const Models& models, Tensor prepared) const override {
    const Tensor y = clip_vision(models(kVision), *vision_, prepared).hidden_states.end()[-2];
    return {{kImage, cast(reshape(y, {1, y.dim(0) * y.dim(1), y.dim(2)}), DType::f32)}};
  }
  HostArray pixels(const std::vector<HostArray>& images, const MediaSize& size) const override {
    const int64_t frames = first_frame_ ? 1 : size.frames;
    check(std::ssize(images) <= frames, Code::invalid_config,
          "num_frames is {}; expected at least {}, one for each image", size.frames, images.size());
    HostArray video = zeros_like(HostArray(Shape{DType::f32, {frames, size.height, size.width, 3}}));
    for (size_t i = 0; i < images.size(); ++i)
      std::ranges::transform(images[i].view<uint8_t>(),
                             video.mutable_view<float>().end() - (i == 0 ? frames : 1) * size.height * size.width * 3,
                             [](uint8_t v) { return static_cast<float>(v) / 127.5f - 1; });
    return video.reshaped(batched(1, video.shape()).dims);
  }
  HostArrays from_moments(const HostArray& moments, int64_t images) const override {
    const Dims& d = moments.dims();  // [1, F', h, w, 2C]
    const int64_t c = autoencoder_->channels, frames = d[1];
    const HostArray scaled = autoencoder_->latent_scale.apply_to_moments(moments);
    HostArray out(Shape{DType::f32, {1, frames, d[2], d[3], masks_ + c}});
    auto from = scaled.view<float>().begin();
    auto to = out.mutable_view<float>().begin();
    for (int64_t f = 0; f < frames; ++f)
      for (int64_t i = 0; i < d[2] * d[3]; ++i, from += 2 * c) {
        // The mask is 1 for every frame of the first latent frame; with two images also for the last frame of the last
        // one.
        for (int64_t k = 0; k < masks_; ++k)
          *to++ = f == 0 || (images == 2 && f == frames - 1 && k == masks_ - 1) ? 1.0f : 0.0f;
        to = std::copy_n(from, c, to);
      }
    return {{kCondition, out}};
  }
  HostArray restored(HostArray latents, const HostArrays& conditioning) const override {
    if (const auto image = conditioning.find(kCondition); first_frame_ && image != conditioning.end())
      set_block(latents, 0, 0, image->second);
    return latents;
  }

 private:
  std::shared_ptr<const Autoencoder> autoencoder_;
  bool first_frame_;   // the image's latents replace those of the first frame, at timestep 0
  int64_t masks_ = 0;  // number of mask channels before an image's latents, which are channels after the noisy latents;
                       // 0: the transformer has no such channels
  std::optional<ClipVisionConfig> vision_;
  ImageProcessor processor_;
};

class Wan final : public Family {
 public:
  explicit Wan(const ModelFolder& folder)
      : Family(wan_spec(folder)),
        transformer_(folder.config<WanTransformerConfig>(kTransformer)),
        text_(folder.config<T5Config>(kText)),
        time_of_tokens_(folder.option("expand_timesteps", false)) {
    if (time_of_tokens_ || channels_of_image()) images_.emplace(folder, spec().autoencoder, time_of_tokens_);
  }

  const ImageConditioning* image_conditioning() const override { return images_ ? &*images_ : nullptr; }

  /// Rows after the end of the text are zeros.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t /*clip_skip*/) const override {
    const Tensor y = t5_encoder(models(kText), text_, text.at(kIds), text.at(kMask));
    return {{kPrompt, y * cast(expand_dims(text.at(kMask), -1), DType::f32)}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    const auto condition = c.find(kCondition);
    if (time_of_tokens_) {
      const auto& p = transformer_.patch_size;
      const int64_t of_frame = x.dim(2) / p[1] * (x.dim(3) / p[2]), tokens = x.dim(1) / p[0] * of_frame;
      t = broadcast_to(expand_dims(t, 1), {t.dim(0), tokens});
      if (condition != c.end()) {
        t = concatenate({zeros_like(slice_axis(t, 1, 0, of_frame)), slice_axis(t, 1, of_frame, tokens)}, 1);
        x = concatenate({condition->second, slice_axis(x, 1, 1, x.dim(1))}, 1);
      }
    } else if (channels_of_image()) {
      x = concatenate({x, condition->second}, -1);
    }
    auto value_of = [&](const char* field) {
      const auto found = c.find(field);
      return found == c.end() ? Tensor() : found->second;
    };
    const WanContext context{value_of(kContext[0]), value_of(kContext[1]), value_of(kContext[2]),
                             value_of(kContext[3])};
    return wan_transformer(models(kTransformer), transformer_,
                           {.sample = x,
                            .timestep = t,
                            .text = c.at(kPrompt),
                            .image = value_of(kImage),
                            .context = context.text_keys ? &context : nullptr,
                            .reuse = options.reuse});
  }
  /// Keys and values of text and image.
  Conditioning prompt_cache(const Models& models, const Conditioning& c) const override {
    const auto image = c.find(kImage);
    const WanContext context =
        wan_context(models(kTransformer), transformer_, c.at(kPrompt), image == c.end() ? Tensor() : image->second);
    Conditioning out = {{kContext[0], context.text_keys}, {kContext[1], context.text_values}};
    if (context.image_keys) out[kContext[2]] = context.image_keys, out[kContext[3]] = context.image_values;
    return out;
  }

 private:
  /// Whether the denoiser's channels include an image's latents and a mask after the noisy latents.
  bool channels_of_image() const { return transformer_.in_channels != spec().autoencoder->channels; }

  WanTransformerConfig transformer_;
  T5Config text_;
  bool time_of_tokens_;
  std::optional<WanImages> images_;
};

}  // namespace

std::shared_ptr<const Family> make_wan(const ModelFolder& folder) { return std::make_shared<Wan>(folder); }

}  // namespace md
