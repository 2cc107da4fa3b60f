// Stable Diffusion 1 and 2, and SDXL: a UNet with cross-attention over what one or two CLIP text encoders make of the
// caption, on the latents of an autoencoder; an optional ControlNet. Which of them a folder is follows from its parts
// and their configs. Sources: Rombach et al. 2022; Podell et al. 2023 (SDXL), section 2; Zhang et al. 2023
// (ControlNet); details as in diffusers' pipelines of the same models.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kUNet = "unet", *kVae = "vae", *kControl = "controlnet", *kPrompt = "prompt_embeds",
                     *kPooled = "text_embeds", *kSizes = "time_ids";

/// A caption's way: the encoder, its tokenizer, the field of its token ids.
struct TextPath {
  ClipTextConfig config;
  std::string component, ids;
};

class StableDiffusion final : public Family {
 public:
  explicit StableDiffusion(const ModelFolder& folder)
      : folder_(folder), unet_(folder.config<UNetConfig>(kUNet)), vae_(folder.config<VaeConfig>(kVae)) {
    texts_.push_back({folder.config<ClipTextConfig>("text_encoder"), "text_encoder", "ids"});
    if (folder.has("text_encoder_2"))
      texts_.push_back({folder.config<ClipTextConfig>("text_encoder_2"), "text_encoder_2", "ids_2"});
    check(texts_.size() == 1 || folder.pipeline().find("StableDiffusionXL") != std::string::npos, Code::invalid_config,
          "{}/model_index.json: a {} has one text encoder, but the folder has text_encoder_2; expected _class_name "
          "StableDiffusionXLPipeline",
          folder.path(), folder.pipeline());
    if (folder.has(kControl)) control_ = folder.config<ControlNetConfig>(kControl);
    // Throws: the condition on sizes comes with that encoder's pooled text.
    if (micro() && texts_.size() == 1) folder.config<ClipTextConfig>("text_encoder_2");
    for (const TextPath& t : texts_) folder.require_tokenizer(tokenizer_of(t));
    check(unet_.in_channels != 2 * vae_.latent_channels + 1, Code::invalid_config,
          "{}: this UNet takes {} channels: it is that of an inpainting model, which sees a mask and the masked image "
          "beside the latents and is not supported; models of text to image take {}",
          folder.path(), unet_.in_channels, vae_.latent_channels);
    check(unet_.in_channels == vae_.latent_channels, Code::invalid_config,
          "the UNet takes {} channels, the autoencoder's latents have {}: models that take more than latents are "
          "not supported",
          unet_.in_channels, vae_.latent_channels);
  }

  std::string denoiser() const override { return kUNet; }
  std::string autoencoder() const override { return kVae; }
  std::vector<std::string> text_encoders() const override {
    std::vector<std::string> names;
    for (const TextPath& t : texts_) names.push_back(t.component);
    return names;
  }

  /// OpenAI's text encoders kept their names, OpenCLIP's did not.
  SingleFile single_file() const override {
    SingleFile f{.prefixes = {{kUNet, "model.diffusion_model."}, {kVae, "first_stage_model."}}};
    if (texts_.size() == 1) {
      f.prefixes[texts_[0].component] = open_clip() ? "cond_stage_model.model." : "cond_stage_model.transformer.";
      return f;
    }
    f.prefixes[texts_[0].component] = "conditioner.embedders.0.transformer.";
    f.prefixes[texts_[1].component] = "conditioner.embedders.1.model.";
    const float said = 1;
    if (noise("prediction_type") == "v_prediction")
      f.more["v_pred"] = HostArray::of<float>({DType::f32, {}}, {&said, 1});
    if (noise("rescale_betas_zero_snr") == true) f.more["ztsnr"] = HostArray::of<float>({DType::f32, {}}, {&said, 1});
    return f;
  }
  std::string kohya_version() const override {
    if (texts_.size() == 2) return "sdxl_base_v1-0";
    return std::string(open_clip() ? "sd_v2" : "sd_v1") + (noise("prediction_type") == "v_prediction" ? "_v" : "");
  }

  std::vector<Field> text_fields() const override {
    std::vector<Field> fields;
    for (const TextPath& t : texts_) fields.push_back({t.ids, {DType::s32, {length()}}});
    return fields;
  }

  std::vector<std::string> second_text_fields() const override {
    return texts_.size() == 2 ? std::vector<std::string>{texts_[1].ids} : std::vector<std::string>();
  }

  HostArrays tokenize(const std::vector<std::string>& captions) const override {
    HostArrays out;
    int64_t cut = 0;
    for (const TextPath& t : texts_) {
      const Tokenizer& tokenizer = folder_.tokenizer(tokenizer_of(t));
      HostArray ids(Shape{DType::s32, {static_cast<int64_t>(captions.size()), length()}});
      auto v = ids.mutable_view<int32_t>();
      cut = 0;
      for (size_t i = 0; i < captions.size(); ++i) {
        bool truncated = false;
        const std::vector<int32_t> row = tokenizer.encode(captions[i], length(), &truncated);
        if (truncated && ++cut == 1)
          log_warning("caption longer than {} tokens is cut: \"{}\"", length(), shortened(captions[i]));
        std::copy(row.begin(), row.end(), v.begin() + static_cast<int64_t>(i) * length());
      }
      out[t.ids] = ids;
    }
    if (cut > 1) log_warning("{} captions are longer than {} tokens and are cut", cut, length());
    return out;
  }

  std::vector<Field> conditioning_fields() const override {
    std::vector<Field> fields = {{kPrompt, {DType::f32, {length(), unet_.cross_attention_dim.front()}}}};
    if (micro()) fields.push_back({kPooled, {DType::f32, {unet_.pooled_width()}}});
    return fields;
  }

  /// Two encoders: the hidden states before the last layer of both, side by side, and the projected end token of the
  /// second. One: its last hidden state after the final norm.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const override {
    const bool two = texts_.size() == 2;
    std::vector<ClipTextOutput> outs;
    for (const TextPath& t : texts_)
      outs.push_back(clip_text(models(t.component), t.config, text.at(t.ids), two ? 0 : clip_skip));
    if (!two) return {{kPrompt, cast(clip_skip > 0 ? outs[0].skipped : outs[0].last_hidden_state, DType::f32)}};
    auto before_last = [clip_skip](const ClipTextOutput& o) {
      const int64_t layers = static_cast<int64_t>(o.hidden_states.size()) - 1;
      check(clip_skip >= 0 && clip_skip < layers, Code::invalid_config,
            "clip_skip is {}; expected 0 to {}, one less than the layers of the text encoder", clip_skip, layers - 1);
      return o.hidden_states[static_cast<size_t>(layers - 1 - clip_skip)];
    };
    return {{kPrompt, cast(concatenate({before_last(outs[0]), before_last(outs[1])}, -1), DType::f32)},
            {kPooled, cast(outs[1].text_embeds, DType::f32)}};
  }

  bool zeros_for_empty_prompt() const override {
    return texts_.size() == 2 && folder_.option("force_zeros_for_empty_prompt", true);
  }

  Dims latent_dims(const MediaSize& size) const override {
    const int64_t down = downscale();
    check(size.height > 0 && size.width > 0 && size.height % down == 0 && size.width % down == 0, Code::invalid_config,
          "size {}x{} is not a multiple of {}, the autoencoder's downscale", size.height, size.width, down);
    check(size.frames == 1, Code::invalid_config, "{} frames are asked for; this model draws pictures", size.frames);
    return {size.height / down, size.width / down, vae_.latent_channels};
  }
  int64_t downscale() const override { return vae_.downscale(); }
  int64_t size_multiple() const override { return downscale() << (unet_.block_out_channels.size() - 1); }
  int64_t decoder_tile() const override { return vae_.sample_size / vae_.downscale(); }
  Posterior encode_media(const Models& models, Tensor pixels) const override {
    return vae_encode(models(kVae), vae_, pixels);
  }
  Tensor decode_media(const Models& models, Tensor latents) const override {
    return cast(vae_decode(models(kVae), vae_, latents), DType::f32);
  }
  LatentScale latent_scale() const override { return {{vae_.shift_factor}, {vae_.scaling_factor}}; }

  /// scaling_factor: one over the latents' standard deviation (Rombach et al. 2022, appendix G).
  nlohmann::json fitted_autoencoder(nlohmann::json config, const EachMoments& each) const override {
    const double scale = 1 / spread_of(each).deviation;
    config["scaling_factor"] = scale;
    log_info("autoencoder: scaling_factor {:.5f} (one over the latents' standard deviation)", scale);
    return config;
  }

  Tensor denoise(const Models& models, Tensor x, Tensor t, const Conditioning& c) const override {
    UNetInputs in{.sample = x, .timestep = t, .encoder_hidden_states = c.at(kPrompt)};
    if (micro()) in.text_embeds = c.at(kPooled), in.time_ids = c.at(kSizes);
    if (const auto picture = c.find("control_image"); picture != c.end()) {
      const Tensor scale = c.at("control_scale");
      ControlResiduals r = controlnet(models(kControl), *control_, in, picture->second);
      for (Tensor& d : r.down) d = d * cast(scale, d.dtype());
      in.down_residuals = r.down;
      in.mid_residual = r.mid * cast(scale, r.mid.dtype());
    }
    return unet2d(models(kUNet), unet_, in);
  }

  std::vector<Field> size_fields() const override {
    if (!micro()) return {};
    return {{kSizes, {DType::f32, {6}}}};
  }
  Conditioning size_conditioning(Graph& g, int64_t batch, const SizeHints& sizes) const override {
    if (!micro()) return {};
    HostArray row(Shape{DType::f32, {1, 6}});
    auto v = row.mutable_view<float>();
    size_t i = 0;
    for (const auto& pair : {sizes.original, sizes.crop_top_left, sizes.target})
      for (int64_t value : pair) v[i++] = static_cast<float>(value);
    return {{kSizes, broadcast_to(constant(g, row), {batch, 6})}};
  }

  std::string file_prefix(uint64_t) const override { return texts_.size() == 2 ? "image_sdxl_" : "image_"; }
  bool always_clips_by_norm() const override { return texts_.size() == 1; }
  void check_repeated_keys(int64_t norm_num_groups) const override {
    constexpr int64_t kEverywhere = 32;  // in every file of the reference
    if (norm_num_groups != kEverywhere && norm_num_groups != unet_.norm_num_groups)
      log_warning("norm_num_groups={} has no effect: the UNet's config.json says {}", norm_num_groups,
                  unet_.norm_num_groups);
  }

  // What MaxDiffusion's TFRecord creators write: for SDXL a latent drawn and scaled, for the others mean and
  // log-variance, unscaled. Source: its feature descriptions.
  std::vector<std::string> encoded_columns() const override {
    if (micro()) return {"pixel_values", "input_ids", kPrompt, kPooled};
    return {"moments|latents", "clip_embeddings|hidden_states"};
  }
  HostArrays from_encoded(const HostArrays& b) const override {
    if (micro())
      return {{"latents", channels_last(b.at("pixel_values").cast(DType::f32))},
              {kPrompt, b.at(kPrompt).cast(DType::f32)},
              {kPooled, b.at(kPooled).cast(DType::f32)}};
    const HostArray stored = b.at("moments").cast(DType::f32);
    HostArray moments(stored.shape());
    const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
    auto from = stored.view<float>();
    auto v = moments.mutable_view<float>();
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(i % (2 * c) < c
                                    ? (from[i] - vae_.shift_factor) * vae_.scaling_factor
                                    : std::exp(0.5 * std::clamp(from[i], -30.0f, 20.0f)) * vae_.scaling_factor);
    return {{"moments", moments}, {kPrompt, b.at("clip_embeddings").cast(DType::f32)}};
  }
  HostArrays to_encoded(const HostArray& moments, const HostArrays& text, const HostArrays& conditioning,
                        const std::function<std::vector<float>(size_t)>& noise) const override {
    if (!micro()) {
      const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
      auto v = moments.view<float>();
      HostArray q(moments.shape());
      auto to = q.mutable_view<float>();
      for (size_t k = 0; k < v.size(); ++k)
        to[k] = k % (2 * c) < c ? v[k] : static_cast<float>(2 * std::log(std::max<double>(v[k], 1e-30)));
      return {{"moments", q}, {"clip_embeddings", conditioning.at(kPrompt)}};
    }
    HostArray ids(Shape{DType::s32, {static_cast<int64_t>(texts_.size()), length()}});
    for (size_t k = 0; k < texts_.size(); ++k)
      set_rows(ids, static_cast<int64_t>(k), text.at(texts_[k].ids).reshaped({1, length()}));
    return {{"pixel_values", without_batch(channels_first(latent_scale().apply(drawn_latent(moments, noise))))},
            {"input_ids", ids},
            {kPrompt, conditioning.at(kPrompt)},
            {kPooled, conditioning.at(kPooled)}};
  }

 private:
  /// Whether the one text encoder is of OpenCLIP, by its activation.
  bool open_clip() const { return texts_[0].config.hidden_act == "gelu"; }
  /// A member of scheduler_config.json; null where there is none.
  nlohmann::json noise(const char* member) const {
    return parse_json(folder_.scheduler_config()).value(member, nlohmann::json());
  }
  static const char* tokenizer_of(const TextPath& t) {
    return t.component == "text_encoder" ? "tokenizer" : "tokenizer_2";
  }
  bool micro() const { return unet_.addition_embed_type.has_value(); }
  int64_t length() const { return texts_[0].config.max_position_embeddings; }

  ModelFolder folder_;
  UNetConfig unet_;
  VaeConfig vae_;
  std::vector<TextPath> texts_;
  std::optional<ControlNetConfig> control_;
};

}  // namespace

std::shared_ptr<const Family> make_stable_diffusion(const ModelFolder& folder) {
  return std::make_shared<StableDiffusion>(folder);
}

}  // namespace md
