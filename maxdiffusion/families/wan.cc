// Wan 2.1 and 2.2: a transformer over the latents of a causal video autoencoder, told by UMT5 what the text says. Which
// of them a folder is follows from its parts: two transformers take turns (2.2 A14B), a time for every token
// (TI2V-5B). Sources: Wan Team 2025; details as in diffusers' pipelines of the same models.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/families/wan_ratios.h"
#include "maxdiffusion/media/image_processor.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/models/wan_transformer.h"
#include "maxdiffusion/models/wan_vae.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"
#include "maxdiffusion/tokenizers/clean_text.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kSecond = "transformer_2", *kVae = "vae", *kText = "text_encoder",
                     *kVision = "image_encoder", *kProcessor = "image_processor/preprocessor_config.json",
                     *kIds = "ids", *kMask = "mask", *kPrompt = "prompt_embeds", *kCondition = "condition",
                     *kImage = "image_embeds",
                     *kStored = "encoder_hidden_states",  // of prompt_embeds, in records
    *kContext[] = {"text_keys", "text_values", "image_keys", "image_values"};

class Wan final : public Family {
 public:
  explicit Wan(const ModelFolder& folder)
      : folder_(folder),
        transformer_(folder.config<WanTransformerConfig>(kTransformer)),
        vae_(folder.config<WanVaeConfig>(kVae)),
        text_(folder.config<T5Config>(kText)),
        length_(folder.option<int64_t>("max_sequence_length", 512)),
        time_of_tokens_(folder.option("expand_timesteps", false)) {
    folder.require_tokenizer("tokenizer");
    const int64_t with_image = 2 * vae_.z_dim + vae_.frame_scale();
    check(transformer_.in_channels == vae_.z_dim || transformer_.in_channels == with_image, Code::invalid_config,
          "the transformer takes {} channels; the autoencoder's latents have {}, {} with an image and its mask",
          transformer_.in_channels, vae_.z_dim, with_image);
    if (transformer_.image_dim) {
      vision_ = folder.config<ClipVisionConfig>(kVision);
      processor_ = ImageProcessor::from_json(parse_json(folder.files().at(kProcessor)));
    }
    check(transformer_.text_dim == text_.d_model, Code::invalid_config,
          "the transformer takes texts of {} features, the text encoder gives {}", transformer_.text_dim,
          text_.d_model);
    check(length_ > 1, Code::invalid_config, "max_sequence_length is {}; expected 2 or more", length_);
  }

  std::string denoiser() const override { return kTransformer; }
  std::string axis_rules() const override { return kWanAxisRules; }
  bool original_lora_names() const override { return true; }
  SingleFile single_file() const override { return {.prefixes = {{kTransformer, ""}}}; }
  std::vector<std::string> denoisers() const override {
    return folder_.has(kSecond) ? std::vector<std::string>{kTransformer, kSecond}
                                : std::vector<std::string>{kTransformer};
  }
  double boundary_time(std::optional<double> boundary_ratio) const override {
    if (!folder_.has(kSecond)) return 0;
    const auto times = parse_json(folder_.scheduler_config()).value("num_train_timesteps", 1000.0);
    return boundary_ratio.value_or(folder_.option("boundary_ratio", 0.875)) * times;
  }
  /// Of every block; of its feed-forward layers too, as most trainers have it.
  std::vector<std::string> lora_targets(const std::string& component) const override {
    if (component == kText) return {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"};
    return {"to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"};
  }
  std::string autoencoder() const override { return kVae; }
  std::vector<std::string> text_encoders() const override { return {kText}; }

  std::vector<Field> text_fields() const override {
    return {{kIds, {DType::s32, {length_}}}, {kMask, {DType::s32, {length_}}}};
  }
  HostArrays tokenize(const std::vector<std::string>& captions) const override {
    const Tokenizer& tokenizer = folder_.tokenizer("tokenizer");
    const Shape shape{DType::s32, {static_cast<int64_t>(captions.size()), length_}};
    HostArray ids(shape), mask(shape);
    auto id = ids.mutable_view<int32_t>().begin();
    auto real = mask.mutable_view<int32_t>().begin();
    int64_t cut = 0;
    for (const std::string& caption : captions) {
      bool truncated = false;
      const std::vector<int32_t> row = tokenizer.tokens(clean_text(caption), length_, &truncated);
      if (truncated && ++cut == 1)
        log_warning("caption longer than {} tokens is cut: \"{}\"", length_, shortened(caption));
      std::fill_n(id, length_, tokenizer.pad_id());
      std::ranges::copy(row, id);
      std::fill_n(real, length_, 0);
      std::fill_n(real, row.size(), 1);
      id += length_, real += length_;
    }
    if (cut > 1) log_warning("{} captions are longer than {} tokens and are cut", cut, length_);
    return {{kIds, ids}, {kMask, mask}};
  }
  std::vector<Field> conditioning_fields() const override {
    return {{kPrompt, {DType::f32, {length_, text_.d_model}}}};
  }
  /// Behind the end of the text there are zeros.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const override {
    check(clip_skip == 0, Code::invalid_config, "clip_skip is {}, but this text encoder is used whole", clip_skip);
    const Tensor y = t5_encoder(models(kText), text_, text.at(kIds), text.at(kMask));
    return {{kPrompt, y * cast(expand_dims(text.at(kMask), -1), DType::f32)}};
  }

  Dims latent_dims(const MediaSize& size) const override {
    const int64_t down = downscale(), multiple = size_multiple(), scale = frame_scale();
    auto nearest = [](int64_t n, int64_t to) { return std::max<int64_t>((n + to / 2) / to, 1) * to; };
    check(size.height > 0 && size.width > 0 && size.height % multiple == 0 && size.width % multiple == 0,
          Code::invalid_config, "size {}x{} is not a multiple of {}, as this model needs; the nearest is {}x{}",
          size.height, size.width, multiple, nearest(size.height, multiple), nearest(size.width, multiple));
    const int64_t multiple_of_frames = scale * transformer_.patch_size[0];
    check(size.frames > 0 && (size.frames - 1) % scale == 0 &&
              ((size.frames - 1) / scale + 1) % transformer_.patch_size[0] == 0,
          Code::invalid_config, "num_frames is {}; this model needs one and a multiple of {}: the nearest is {}",
          size.frames, multiple_of_frames, 1 + std::max<int64_t>(size.frames - 1 + scale / 2, 0) / scale * scale);
    return {1 + (size.frames - 1) / scale, size.height / down, size.width / down, vae_.z_dim};
  }
  int64_t downscale() const override { return vae_.downscale(); }
  int64_t frame_scale() const override { return vae_.frame_scale(); }
  int64_t default_frames() const override { return 1 + 20 * frame_scale(); }
  int64_t size_multiple() const override {
    return downscale() * std::max(transformer_.patch_size[1], transformer_.patch_size[2]);
  }
  Posterior encode_chunk(const Models& models, Tensor pixels, MediaState& state) const override {
    return wan_vae_encode(models(kVae), vae_, pixels, &state);
  }
  Tensor decode_chunk(const Models& models, Tensor latents, MediaState& state) const override {
    return wan_vae_decode(models(kVae), vae_, latents, &state);
  }
  LatentScale latent_scale() const override {
    LatentScale s{vae_.latents_mean, vae_.latents_std};
    for (double& v : s.scale) v = 1 / v;
    return s;
  }
  /// latents_mean and latents_std of each channel.
  nlohmann::json fitted_autoencoder(nlohmann::json config, const EachMoments& each) const override {
    const size_t c = static_cast<size_t>(vae_.z_dim);
    std::vector<double> sums(c), squares(c);
    double n = 0;  // positions
    each([&](const HostArray& moments) { n += static_cast<double>(moments.shape().elements()) / (2.0 * c); });
    each([&](const HostArray& moments) {
      auto v = moments.view<float>();
      for (size_t i = 0; i < v.size(); i += 2 * c)
        for (size_t k = 0; k < c; ++k) {
          const double mean = v[i + k], deviation = v[i + c + k];
          sums[k] += mean / n, squares[k] += (mean * mean + deviation * deviation) / n;
        }
    });
    for (size_t k = 0; k < c; ++k) squares[k] = std::sqrt(std::max(squares[k] - sums[k] * sums[k], 1e-12));
    config["latents_mean"] = sums;
    config["latents_std"] = squares;
    return config;
  }

  // Wan 2.1: the image encoder sees the image, the autoencoder a video that is grey but for it, and a mask says which
  // frames are known. 2.2 has no image encoder. TI2V-5B: the first frame's latents are the image's, at time 0.
  ImageCount images() const override {
    if (time_of_tokens_) return {0, 1};
    if (!channels_of_image()) return {};
    return {transformer_.pos_embed_seq_len ? 2 : 1, vision_ && !transformer_.pos_embed_seq_len ? 1 : 2};
  }
  std::vector<Field> image_fields(const MediaSize& size) const override {
    Dims dims = latent_dims(size);
    if (time_of_tokens_) dims[0] = 1;
    if (channels_of_image()) dims.back() += frame_scale();
    std::vector<Field> fields = {{kCondition, {DType::f32, dims}}};
    if (vision_) fields.push_back({kImage, {DType::f32, {images().least * vision_->tokens(), vision_->hidden_size}}});
    return fields;
  }
  std::string image_encoder() const override { return vision_ ? kVision : ""; }
  HostArray prepare_images(const std::vector<HostArray>& images) const override {
    HostArray all;
    for (size_t i = 0; i < images.size(); ++i) {
      const HostArray one = processor_.apply(images[i]);
      add_rows(all, std::ssize(images), static_cast<int64_t>(i), one.reshaped(batched(1, one.shape()).dims));
    }
    return all;
  }
  Conditioning encode_images(const Models& models, Tensor prepared) const override {
    const Tensor y = clip_vision(models(kVision), *vision_, prepared).hidden_states.end()[-2];
    return {{kImage, cast(reshape(y, {1, y.dim(0) * y.dim(1), y.dim(2)}), DType::f32)}};
  }
  HostArray image_pixels(const std::vector<HostArray>& images, const MediaSize& size) const override {
    const int64_t frames = time_of_tokens_ ? 1 : size.frames;
    check(std::ssize(images) <= frames, Code::invalid_config, "num_frames is {}; {} images need as many at least",
          size.frames, images.size());
    HostArray video = zeros_as(HostArray(Shape{DType::f32, {frames, size.height, size.width, 3}}));
    for (size_t i = 0; i < images.size(); ++i)
      std::ranges::transform(images[i].view<uint8_t>(),
                             video.mutable_view<float>().end() - (i == 0 ? frames : 1) * size.height * size.width * 3,
                             [](uint8_t v) { return static_cast<float>(v) / 127.5f - 1; });
    return video.reshaped(batched(1, video.shape()).dims);
  }
  HostArrays image_conditioning(const HostArray& moments, int64_t images, const MediaSize&) const override {
    const Dims& d = moments.dims();  // [1, F', h, w, 2C]
    const int64_t c = vae_.z_dim, masks = channels_of_image() ? frame_scale() : 0, frames = d[1];
    const HostArray scaled = latent_scale().apply_to_moments(moments);
    HostArray out(Shape{DType::f32, {1, frames, d[2], d[3], masks + c}});
    auto from = scaled.view<float>().begin();
    auto to = out.mutable_view<float>().begin();
    for (int64_t f = 0; f < frames; ++f)
      for (int64_t i = 0; i < d[2] * d[3]; ++i, from += 2 * c) {
        // Of the frames that a latent frame stands for: all of the first, the last alone of the last.
        for (int64_t k = 0; k < masks; ++k)
          *to++ = f == 0 || (images == 2 && f == frames - 1 && k == masks - 1) ? 1.0f : 0.0f;
        to = std::copy_n(from, c, to);
      }
    return {{kCondition, out}};
  }
  HostArray with_images(HostArray latents, const HostArrays& conditioning) const override {
    if (const auto image = conditioning.find(kCondition); time_of_tokens_ && image != conditioning.end())
      set_block(latents, 0, 0, image->second);
    return latents;
  }

  Tensor denoise(const Models& models, Tensor x, Tensor t, const Conditioning& c) const override {
    return denoise_keeping(models, x, t, c, {}).sample;
  }
  Denoised denoise_keeping(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                           Tensor residual) const override {
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
    auto given = [&](const char* field) {
      const auto found = c.find(field);
      return found == c.end() ? Tensor() : found->second;
    };
    const WanContext context{given(kContext[0]), given(kContext[1]), given(kContext[2]), given(kContext[3])};
    const WanOutputs out = wan_transformer(models(kTransformer), transformer_,
                                           {.sample = x,
                                            .timestep = t,
                                            .text = c.at(kPrompt),
                                            .image = given(kImage),
                                            .context = context.text_keys ? &context : nullptr,
                                            .residual = residual});
    return {out.sample, out.residual};
  }
  std::vector<double> magcache_ratios(const MediaSize& size, bool images) const override {
    return wan_magcache_ratios(transformer_,
                               {.two_transformers = folder_.has(kSecond), .image = images, .height = size.height});
  }
  /// Keys and values of the text and the image.
  Conditioning shared_context(const Models& models, const Conditioning& c) const override {
    const auto image = c.find(kImage);
    const WanContext context =
        wan_context(models(kTransformer), transformer_, c.at(kPrompt), image == c.end() ? Tensor() : image->second);
    Conditioning out = {{kContext[0], context.text_keys}, {kContext[1], context.text_values}};
    if (context.image_keys) out[kContext[2]] = context.image_keys, out[kContext[3]] = context.image_values;
    return out;
  }

  std::vector<std::string> model_names() const override {
    return {folder_.has(kSecond) || time_of_tokens_ ? "wan2.2" : "wan2.1"};
  }
  std::vector<std::string> model_types() const override {
    if (time_of_tokens_) return {"T2V", "I2V", "TI2V"};
    return {channels_of_image() ? "I2V" : "T2V"};
  }
  /// With its three products of D² per text token, of which keys and values are two.
  double reference_tflops(const MediaSize& size, double samples) const override {
    const Dims latent = latent_dims(size);
    int64_t tokens = 1;
    for (size_t i = 0; i < 3; ++i) tokens *= latent[i] / transformer_.patch_size[i];
    const double d = static_cast<double>(transformer_.width()), ffn = static_cast<double>(transformer_.ffn_dim),
                 s = static_cast<double>(tokens), text = static_cast<double>(length_);
    const double self = 6 * s * d * d + 4 * s * s * d, cross = 6 * text * d * d + 2 * s * d * d + 4 * s * text * d,
                 out = 4 * s * d * d, feed_forward = 4 * s * d * ffn;
    return 3 * static_cast<double>(transformer_.num_layers) * (self + cross + out + feed_forward) * samples / 1e12;
  }

  std::string file_prefix(uint64_t seed) const override { return fmt::format("wan_output_{}_", seed); }

  // What MaxDiffusion's converters write: a scaled latent, channels first, and the text's embeddings.
  std::vector<std::string> encoded_columns() const override { return {"latents", kStored}; }
  HostArrays from_encoded(const HostArrays& records) const override {
    return {{"latents", channels_last(records.at("latents").cast(DType::f32))},
            {kPrompt, records.at(kStored).cast(DType::f32)}};
  }
  HostArrays to_encoded(const HostArray& moments, const HostArrays&, const HostArrays& conditioning,
                        const std::function<std::vector<float>(size_t)>& noise) const override {
    const HostArray z = drawn_latent(moments, noise);
    return {{"latents", without_batch(channels_first(latent_scale().apply(z)))}, {kStored, conditioning.at(kPrompt)}};
  }

 private:
  /// Whether the denoiser sees an image's latents and a mask beside the noisy latents.
  bool channels_of_image() const { return transformer_.in_channels != vae_.z_dim; }

  ModelFolder folder_;
  WanTransformerConfig transformer_;
  WanVaeConfig vae_;
  T5Config text_;
  std::optional<ClipVisionConfig> vision_;
  ImageProcessor processor_;
  int64_t length_;
  bool time_of_tokens_;
};

}  // namespace

std::shared_ptr<const Family> make_wan(const ModelFolder& folder) { return std::make_shared<Wan>(folder); }

}  // namespace md
