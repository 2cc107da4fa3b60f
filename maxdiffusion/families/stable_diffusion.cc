// Stable Diffusion 1 and 2, and SDXL: a UNet on the latents of an autoencoder with cross-attention to the encodings of
// one or two CLIP text encoders, and an optional ControlNet. The components of a folder and their configs determine the
// model. Sources: Rombach et al. 2022; Podell et al. 2023 (SDXL), section 2; Zhang et al. 2023 (ControlNet); details as
// in diffusers' pipelines of the same models.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Numbers of size conditioning with an aesthetic score: SDXL's refiner.
constexpr int64_t kScored = 5;
constexpr const char *kUNet = "unet", *kVae = "vae", *kText = "text_encoder", *kText2 = "text_encoder_2",
                     *kPrompt = "prompt_embeds", *kPooled = "text_embeds", *kSizes = "time_ids",
                     *kInpainting = "inpainting";

/// Files keep transformers' names for OpenAI's text encoders, but not for OpenCLIP's.
SingleFile single_file(bool two, bool open_clip, const nlohmann::json& scheduler) {
  SingleFile f{.prefixes = {{kUNet, "model.diffusion_model."}, {kVae, "first_stage_model."}}};
  if (!two) {
    f.prefixes[kText] = open_clip ? "cond_stage_model.model." : "cond_stage_model.transformer.";
    return f;
  }
  f.prefixes[kText] = "conditioner.embedders.0.transformer.";
  f.prefixes[kText2] = "conditioner.embedders.1.model.";
  const float yes = 1;
  if (scheduler.value("prediction_type", nlohmann::json()) == "v_prediction")
    f.extra_tensors["v_pred"] = HostArray::of<float>({DType::f32, {}}, {&yes, 1});
  if (scheduler.value("rescale_betas_zero_snr", nlohmann::json()) == true)
    f.extra_tensors["ztsnr"] = HostArray::of<float>({DType::f32, {}}, {&yes, 1});
  return f;
}

/// Paths of the first attention of every transformer block that attends to its own tokens.
std::vector<std::string> self_attentions(const UNetConfig& c) {
  std::vector<std::string> all;
  auto add = [&](const std::string& block, int64_t transformers, size_t level) {
    for (int64_t i = 0; i < transformers; ++i)
      for (int64_t k = 0; k < c.transformer_layers_per_block[level]; ++k)
        all.push_back(fmt::format("{}.attentions.{}.transformer_blocks.{}.attn1", block, i, k));
  };
  const size_t levels = c.block_out_channels.size();
  for (size_t level = 0; level < levels; ++level)
    if (c.down_block_types[level] == "CrossAttnDownBlock2D" && !c.only_cross_attention[level])
      add(fmt::format("down_blocks.{}", level), c.layers_per_block[level], level);
  if (c.mid_block_type == "UNetMidBlock2DCrossAttn") add("mid_block", 1, levels - 1);
  for (size_t i = 0; i < levels; ++i)
    if (const size_t level = levels - 1 - i;
        c.up_block_types[i] == "CrossAttnUpBlock2D" && !c.only_cross_attention[level])
      add(fmt::format("up_blocks.{}", i), c.layers_per_block[level] + 1, level);
  return all;
}

/// Of a CLIP text encoder, with the learned embeddings of the folder.
TextEncoderSpec text_encoder_spec(const ModelFolder& folder, const std::string& component,
                                  const std::string& tokenizer) {
  const auto& clip = folder.config<ClipTextConfig>(component);
  const std::vector<Placeholder> placeholders = folder.placeholders(component);
  return {.component = component,
          .tokenizer = with_placeholders(folder.tokenizer(tokenizer), placeholders, clip.vocab_size),
          .max_tokens = clip.max_position_embeddings,
          .embedding_width = clip.hidden_size,
          .placeholders = placeholders};
}

FamilySpec stable_diffusion_spec(const ModelFolder& folder) {
  const auto& unet = folder.config<UNetConfig>(kUNet);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder(kVae);
  // SDXL's refiner has the second encoder alone.
  const bool refines = folder.has(kText2) && !folder.has(kText), two = folder.has(kText2) && !refines;
  const auto& clip = folder.config<ClipTextConfig>(refines ? kText2 : kText);
  // Size conditioning requires the second encoder's pooled embedding.
  const bool micro = unet.addition_embed_type.has_value();
  if (two || micro) folder.config<ClipTextConfig>(kText2);
  check(!folder.has(kText2) || folder.pipeline().find("StableDiffusionXL") != std::string::npos, Code::invalid_config,
        "{}/model_index.json: a {} has one text encoder, but the folder has text_encoder_2; expected _class_name "
        "StableDiffusionXLPipeline",
        folder.path(), folder.pipeline());
  const int64_t length = clip.max_position_embeddings;
  const bool open_clip = clip.hidden_act == "gelu";  // else OpenAI's
  const nlohmann::json scheduler = parse_json(folder.scheduler_config());
  FamilySpec spec = {
      .denoisers = {kUNet},
      .autoencoder = vae,
      .text_encoders = {text_encoder_spec(folder, refines ? kText2 : kText, refines ? "tokenizer_2" : "tokenizer")},
      .conditioning = {{kPrompt, {DType::f32, {length, unet.cross_attention_dim.front()}}}},
      .zero_empty_prompt = (two || refines) && folder.option("force_zeros_for_empty_prompt", true),
      .training_patch = int64_t{1} << (unet.block_out_channels.size() - 1),
      .image_to_image = two || refines ? ImageToImage{.strength = 0.3, .inpaint_strength = 0.9999} : ImageToImage{},
      .self_attentions = self_attentions(unet),
      .has_freeu = true,
      .single_file = refines ? SingleFile{} : single_file(two, open_clip, scheduler),
      .records = micro ? sdxl_records() : sd_records(),
      .reference = reference_conventions(folder)};
  spec.lora.kohya_version = open_clip ? "sd_v2" : "sd_v1";
  if (scheduler.value("prediction_type", nlohmann::json()) == "v_prediction") spec.lora.kohya_version += "_v";
  if (two) {
    spec.text_encoders.push_back(text_encoder_spec(folder, kText2, "tokenizer_2"));
    spec.text_encoders.back().ids = "ids_2";
    spec.text_encoders.back().max_tokens = length;
    spec.text_encoders.back().second_prompt = true;
    spec.lora.kohya_version = "sdxl_base_v1-0";
  }
  for (const std::string& component : spec.text_components())
    spec.chunk_widths.push_back(folder.config<ClipTextConfig>(component).hidden_size);
  if (micro) {
    const int64_t pooled = folder.config<ClipTextConfig>(kText2).projection_dim,
                  sizes = unet.projection_class_embeddings_input_dim - pooled, each = unet.addition_time_embed_dim;
    check(sizes == 6 * each || sizes == kScored * each, Code::invalid_config,
          "unet: projection_class_embeddings_input_dim is {}; expected {}, of {} of the text and 6 sizes, or {}, of {} "
          "sizes and an aesthetic score",
          unet.projection_class_embeddings_input_dim, pooled + 6 * each, pooled, pooled + kScored * each, kScored - 1);
    spec.conditioning.push_back({kPooled, {DType::f32, {pooled}}});
    spec.size_conditioning = {{kSizes, {DType::f32, {sizes / each}}}};
  }
  const int64_t with_image = 2 * vae->channels + 1;
  check(unet.in_channels == vae->channels || unet.in_channels == with_image, Code::invalid_config,
        "unet: in_channels is {}; expected {}, the autoencoder's latent channels, or {}, with a mask and the masked "
        "image: "
        "models that take other things than latents are not supported",
        unet.in_channels, vae->channels, with_image);
  if (unet.in_channels == with_image) spec.inpainting = kInpainting;
  while (folder.has(control_component(spec.controlnets.size())))
    spec.controlnets.push_back(control_component(spec.controlnets.size()));
  return spec;
}

class StableDiffusion final : public Family {
 public:
  explicit StableDiffusion(const ModelFolder& folder)
      : Family(stable_diffusion_spec(folder)), unet_(folder.config<UNetConfig>(kUNet)) {
    for (const TextEncoderSpec& e : spec().text_encoders) {
      texts_.push_back(folder.config<ClipTextConfig>(e.component));
      texts_.back().added_tokens = ids_of(e.placeholders);
    }
    for (const std::string& component : spec().controlnets)
      controls_.push_back(folder.config<ControlNetConfig>(component));
  }

  /// With size conditioning: the hidden states before the last layer of all encoders, concatenated along features, and
  /// the projected end token of the second. One encoder: its last hidden state after the final norm.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const override {
    const bool two = texts_.size() == 2 || micro();
    std::vector<ClipTextOutput> outs;
    for (size_t i = 0; i < texts_.size(); ++i) {
      const TextEncoderSpec& e = spec().text_encoders[i];
      outs.push_back(clip_text(models(e.component), texts_[i], text.at(e.ids), two ? 0 : clip_skip));
    }
    if (!two) return {{kPrompt, cast(clip_skip > 0 ? outs[0].skipped : outs[0].last_hidden_state, DType::f32)}};
    auto before_last = [clip_skip](const ClipTextOutput& o) {
      const int64_t layers = static_cast<int64_t>(o.hidden_states.size()) - 1;
      check(clip_skip >= 0 && clip_skip < layers, Code::invalid_config,
            "clip_skip is {}; expected 0 to {}, one less than the layers of the text encoder", clip_skip, layers - 1);
      return o.hidden_states[static_cast<size_t>(layers - 1 - clip_skip)];
    };
    std::vector<Tensor> states;
    for (const ClipTextOutput& o : outs) states.push_back(before_last(o));
    return {{kPrompt, cast(states.size() > 1 ? concatenate(states, -1) : states[0], DType::f32)},
            {kPooled, cast(outs.back().text_embeds, DType::f32)}};
  }

  Prediction predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                     const PredictOptions& options) const override {
    UNetInputs in{.sample = x, .timestep = t, .encoder_hidden_states = c.at(kPrompt), .freeu = options.freeu};
    if (micro()) in.text_embeds = c.at(kPooled), in.time_ids = c.at(kSizes);
    in = with_controls(models, in, c);
    if (const std::string& field = spec().inpainting; !field.empty()) {
      check(c.contains(field), Code::invalid_config,
            "this UNet takes {} channels: it is an inpainting model, which takes a mask and the masked image; expected "
            "{}, "
            "as in text to image",
            unet_.in_channels, x.dim(-1));
      in.sample = concatenate({x, cast(c.at(field), x.dtype())}, -1);
    }
    return {unet2d(models(kUNet), unet_, in), {}};
  }

  Conditioning extra_conditioning(Graph& g, int64_t batch, const SampleSettings& settings) const override {
    if (!micro()) return {};
    const SizeHints& sizes = settings.sizes;
    const int64_t columns = spec().size_conditioning[0].shape.dims[0];
    HostArray all(Shape{DType::f32, {batch, columns}});
    auto v = all.mutable_view<float>().begin();
    for (int64_t i = 0; i < batch; ++i) {
      for (const auto& pair : {sizes.original, sizes.crop_top_left})
        for (int64_t value : pair) *v++ = static_cast<float>(value);
      if (columns == kScored)
        *v++ = static_cast<float>(i < settings.negative_rows ? settings.negative_aesthetic_score
                                                             : settings.aesthetic_score);
      else
        for (int64_t value : sizes.target) *v++ = static_cast<float>(value);
    }
    if (columns != kScored) return {{kSizes, broadcast_to(constant(g, rows(all, 0, 1)), {batch, columns})}};
    return {{kSizes, constant(g, all)}};
  }

 private:
  /// The UNet's inputs with the sum of the residuals of all ControlNets that have an image.
  UNetInputs with_controls(const Models& models, const UNetInputs& in, const Conditioning& c) const {
    UNetInputs out = in;
    for (size_t i = 0; i < controls_.size(); ++i) {
      const auto image = c.find(control_image_field(i));
      if (image == c.end()) continue;
      const Tensor scale = c.at(control_scale_field(i));
      const auto add = [&](Tensor sum, Tensor residual) {
        residual = residual * cast(scale, residual.dtype());
        return sum ? sum + residual : residual;
      };
      const ControlResiduals r = controlnet(models(control_component(i)), controls_[i], in, image->second);
      out.down_residuals.resize(r.down.size());
      for (size_t k = 0; k < r.down.size(); ++k) out.down_residuals[k] = add(out.down_residuals[k], r.down[k]);
      out.mid_residual = add(out.mid_residual, r.mid);
    }
    return out;
  }
  bool micro() const { return unet_.addition_embed_type.has_value(); }

  UNetConfig unet_;
  std::vector<ClipTextConfig> texts_;
  std::vector<ControlNetConfig> controls_;
};

}  // namespace

std::shared_ptr<const Family> make_stable_diffusion(const ModelFolder& folder) {
  return std::make_shared<StableDiffusion>(folder);
}

}  // namespace md
