// Stable Diffusion 1 and 2, and SDXL: a UNet on the latents of an autoencoder with cross-attention to the encodings of
// one or two CLIP text encoders, and an optional ControlNet. The components of a folder and their configs determine the
// model. Sources: Rombach et al. 2022; Podell et al. 2023 (SDXL), section 2; Zhang et al. 2023 (ControlNet); details as
// in diffusers' pipelines of the same models.
#include <fmt/format.h>
#include <algorithm>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/families/clip_encoder.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/media/image_processor.h"
#include "maxdiffusion/media/resize.h"
#include "maxdiffusion/models/clip_vision.h"
#include "maxdiffusion/models/controlnet.h"
#include "maxdiffusion/models/ip_adapter.h"
#include "maxdiffusion/models/t2i_adapter.h"
#include "maxdiffusion/models/unet2d.h"
#include "maxdiffusion/nn/layers.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

/// Numbers of size conditioning with an aesthetic score: SDXL's refiner.
constexpr int64_t kScored = 5;
constexpr const char *kUNet = "unet", *kVae = "vae", *kText = "text_encoder", *kText2 = "text_encoder_2",
                     *kPrompt = "prompt_embeds", *kPooled = "text_embeds", *kSizes = "time_ids",
                     *kInpainting = "inpainting", *kIpAdapter = "ip_adapter", *kT2iAdapter = "t2i_adapter",
                     *kOwnAdapter = "adapter", *kGuidance = "guidance", *kVision = "image_encoder",
                     *kImageTokens = "image_tokens", *kImageScale = "image_scale", *kFeatureScale = "adapter_scale";

/// Files keep transformers' names for OpenAI's text encoders, but not for OpenCLIP's. `second`: there is
/// text_encoder_2, after text_encoder or alone.
SingleFile single_file(bool first, bool second, bool open_clip, const nlohmann::json& scheduler) {
  SingleFile f{.prefixes = {{kUNet, "model.diffusion_model."}, {kVae, "first_stage_model."}}};
  if (!second) {
    f.prefixes[kText] = open_clip ? "cond_stage_model.model." : "cond_stage_model.transformer.";
    return f;
  }
  if (first) f.prefixes[kText] = "conditioner.embedders.0.transformer.";
  f.prefixes[kText2] = first ? "conditioner.embedders.1.model." : "conditioner.embedders.0.model.";
  const float yes = 1;
  if (scheduler.value("prediction_type", nlohmann::json()) == "v_prediction")
    f.extra_tensors["v_pred"] = HostArray::of<float>({DType::f32, {}}, {&yes, 1});
  if (scheduler.value("rescale_betas_zero_snr", nlohmann::json()) == true)
    f.extra_tensors["ztsnr"] = HostArray::of<float>({DType::f32, {}}, {&yes, 1});
  return f;
}

std::string feature_field(size_t i) { return fmt::format("adapter_feature_{}", i); }

/// Paths of the attentions to the text in the order of IP-Adapter's files: down blocks, up blocks, the mid block.
std::vector<std::string> cross_attentions(const UNetConfig& c) {
  std::vector<std::string> all;
  auto add = [&](const std::string& block, int64_t transformers, size_t level) {
    for (int64_t i = 0; i < transformers; ++i)
      for (int64_t k = 0; k < c.transformer_layers_per_block[level]; ++k)
        all.push_back(fmt::format("{}.attentions.{}.transformer_blocks.{}.attn2", block, i, k));
  };
  const size_t levels = c.block_out_channels.size();
  for (size_t level = 0; level < levels; ++level)
    if (c.down_block_types[level] == "CrossAttnDownBlock2D")
      add(fmt::format("down_blocks.{}", level), c.layers_per_block[level], level);
  for (size_t i = 0; i < levels; ++i)
    if (const size_t level = levels - 1 - i; c.up_block_types[i] == "CrossAttnUpBlock2D")
      add(fmt::format("up_blocks.{}", i), c.layers_per_block[level] + 1, level);
  if (c.mid_block_type == "UNetMidBlock2DCrossAttn") add("mid_block", 1, levels - 1);
  return all;
}

class IpAdapter final : public ImageAdapter {
 public:
  explicit IpAdapter(const ModelFolder& folder)
      : config(folder.config<IpAdapterConfig>(kIpAdapter)), vision_(folder.config<ClipVisionConfig>(kVision)) {
    name = kIpAdapter, components = {kVision, kIpAdapter}, scale = kImageScale;
    const auto& unet = folder.config<UNetConfig>("unet");
    attentions = cross_attentions(unet);
    check(config.layers.size() == attentions.size() && config.width == unet.cross_attention_dim.front(),
          Code::invalid_config,
          "ip_adapter: it is for {} attentions to texts of width {}; this UNet has {} of width {}: it is for another "
          "model",
          config.layers.size(), config.width, attentions.size(), unet.cross_attention_dim.front());
    const int64_t width = config.plus ? vision_.hidden_size : vision_.projection_dim;
    check(config.embed == width && (config.plus || vision_.with_projection), Code::invalid_config,
          "ip_adapter: it takes {} features of an image; the image encoder gives {}: it is for another one; set "
          "ip_adapter_image_encoder",
          config.embed, width);
  }

  HostArray prepare(const HostArray& image, const MediaSize&) const override {
    const ImageProcessor processor{.shortest_edge = vision_.image_size,
                                   .crop = {vision_.image_size, vision_.image_size}};
    const HostArray one = processor.apply(image);
    return one.reshaped({1, vision_.image_size, vision_.image_size, vision_.num_channels});
  }
  Fields encode(const Models& models, Tensor prepared) const override {
    // Without an image: zeros in place of what the image encoder takes (plus) or gives.
    auto and_zeros = [](Tensor x) { return concatenate({x, zeros_like(x)}, 0); };
    const ClipVisionOutput y = clip_vision(models(kVision), vision_, config.plus ? and_zeros(prepared) : prepared);
    const Tensor embeddings = config.plus ? y.hidden_states.end()[-2] : and_zeros(y.image_embeds);
    const std::vector<Tensor> tokens =
        split(cast(ip_adapter_tokens(models(kIpAdapter), config, embeddings), DType::f32), 2, 0);
    return {{{kImageTokens, tokens[0]}}, {{kImageTokens, tokens[1]}}};
  }

  IpAdapterConfig config;
  std::vector<std::string> attentions;  // paths, in the order of config.layers

 private:
  ClipVisionConfig vision_;
};

class T2iAdapter final : public ImageAdapter {
 public:
  /// `component`: kT2iAdapter, which a key names, or the folder's own, which acts where a request has an image for it.
  T2iAdapter(const ModelFolder& folder, const char* component)
      : config_(folder.config<T2iAdapterConfig>(component)), component_(component) {
    name = kT2iAdapter, components = {component}, scale = kFeatureScale, needs_image = component == kT2iAdapter;
    check(config_.in_channels == 3 || config_.in_channels == 1, Code::invalid_config,
          "t2i_adapter: in_channels is {}; expected 3 or 1", config_.in_channels);
  }
  HostArray prepare(const HostArray& image, const MediaSize& size) const override {
    const int64_t m = config_.multiple();
    check(size.height % m == 0 && size.width % m == 0, Code::invalid_config,
          "height and width are {}x{}; expected multiples of {} with this t2i_adapter", size.height, size.width, m);
    const HostArray rgb = resize_rgb8(image, size.height, size.width, Filter::lanczos);
    HostArray out(Shape{DType::f32, {1, size.height, size.width, config_.in_channels}});
    auto to = out.mutable_view<float>().begin();
    const auto v = rgb.view<uint8_t>();
    for (size_t i = 0; i < v.size(); i += 3) {
      if (config_.in_channels == 3)
        for (size_t k = 0; k < 3; ++k) *to++ = static_cast<float>(v[i + k]) / 255;
      else  // grey as Pillow's L
        *to++ = static_cast<float>((v[i] * 19595 + v[i + 1] * 38470 + v[i + 2] * 7471 + 0x8000) >> 16) / 255;
    }
    return out;
  }
  Fields encode(const Models& models, Tensor prepared) const override {
    Fields out;
    for (size_t i = 0; const Tensor& feature : t2i_adapter(models(component_), config_, prepared))
      out.image[feature_field(i++)] = cast(feature, DType::f32);
    return out;
  }

 private:
  T2iAdapterConfig config_;
  const char* component_;
};

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

SampleDefaults sample_defaults(const UNetConfig& unet, const Autoencoder& vae, bool xl,
                               const nlohmann::json& scheduler) {
  const int64_t side = unet.sample_size * vae.downscale;
  SampleDefaults d{.height = side, .width = side, .num_inference_steps = 50, .guidance_scale = xl ? 5 : 7.5};
  if (unet.time_cond_proj_dim) d.num_inference_steps = 4, d.guidance_scale = 8.5;  // a latent consistency model
  // SD-Turbo and SDXL-Turbo are known by their sampler.
  if (scheduler.value("_class_name", "") == "EulerAncestralDiscreteScheduler" &&
      scheduler.value("timestep_spacing", "") == "trailing")
    d = {.height = 512, .width = 512, .num_inference_steps = 4, .guidance_scale = 0};
  return d;
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
      .text_encoders = {clip_encoder_spec(folder, refines ? kText2 : kText, refines ? "tokenizer_2" : "tokenizer")},
      .conditioning = {{kPrompt, {DType::f32, {length, unet.cross_attention_dim.front()}}}},
      .zero_empty_prompt = (two || refines) && folder.option("force_zeros_for_empty_prompt", true),
      .embedded_guidance = unet.time_cond_proj_dim.has_value(),
      .training_patch = int64_t{1} << (unet.block_out_channels.size() - 1),
      .sample_defaults = sample_defaults(unet, *vae, two || refines, scheduler),
      .image_to_image = two || refines ? ImageToImage{.strength = 0.3,
                                                      .inpaint_strength = 0.9999,
                                                      .control_strength = 0.8,
                                                      .control_inpaint_scale = 1}
                                       : ImageToImage{},
      .self_attentions = self_attentions(unet),
      .up_layers = unet.up_layers(),
      .has_freeu = true,
      .single_file = single_file(!refines, folder.has(kText2), open_clip, scheduler),
      .records = micro ? sdxl_records() : sd_records(),
      .reference = reference_conventions(folder)};
  spec.lora.kohya_version = open_clip ? "sd_v2" : "sd_v1";
  if (scheduler.value("prediction_type", nlohmann::json()) == "v_prediction") spec.lora.kohya_version += "_v";
  if (two) {
    spec.text_encoders.push_back(clip_encoder_spec(folder, kText2, "tokenizer_2"));
    spec.text_encoders.back().ids = "ids_2";
    spec.text_encoders.back().max_tokens = length;
    spec.text_encoders.back().second_prompt = true;
    spec.lora.kohya_version = "sdxl_base_v1-0";
  }
  spec.most_clip_skip = clip.num_hidden_layers;
  for (const std::string& component : spec.text_components()) {
    const auto& encoder = folder.config<ClipTextConfig>(component);
    spec.chunk_widths.push_back(encoder.hidden_size);
    if (two || micro) spec.most_clip_skip = std::min(spec.most_clip_skip, encoder.num_hidden_layers - 1);
  }
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
  if (folder.has(kIpAdapter)) spec.image_adapters.push_back(std::make_shared<const IpAdapter>(folder));
  for (const char* component : {kT2iAdapter, kOwnAdapter})
    if (folder.has(component)) spec.image_adapters.push_back(std::make_shared<const T2iAdapter>(folder, component));
  return spec;
}

class StableDiffusion final : public Family {
 public:
  explicit StableDiffusion(const ModelFolder& folder)
      : Family(stable_diffusion_spec(folder)), unet_(folder.config<UNetConfig>(kUNet)) {
    for (const TextEncoderSpec& e : spec().text_encoders) texts_.push_back(clip_config(folder, e));
    for (const std::string& component : spec().controlnets)
      controls_.push_back(folder.config<ControlNetConfig>(component));
    for (const auto& adapter : spec().image_adapters)
      if (adapter->name == kIpAdapter) ip_adapter_ = std::static_pointer_cast<const IpAdapter>(adapter);
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
      return o.hidden_states.at(o.hidden_states.size() - 2 - static_cast<size_t>(clip_skip));
    };
    std::vector<Tensor> states;
    for (const ClipTextOutput& o : outs) states.push_back(before_last(o));
    return {{kPrompt, cast(states.size() > 1 ? concatenate(states, -1) : states[0], DType::f32)},
            {kPooled, cast(outs.back().text_embeds, DType::f32)}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    UNetInputs in{.sample = x,
                  .timestep = t,
                  .encoder_hidden_states = c.at(kPrompt),
                  .freeu = options.freeu,
                  .reuse = options.reuse};
    if (const auto rows = c.find(FamilySpec::kChunkRows); rows != c.end()) in.text_rows = rows->second;
    if (micro()) in.text_embeds = c.at(kPooled), in.time_ids = c.at(kSizes);
    if (unet_.time_cond_proj_dim)  // as diffusers' get_guidance_scale_embedding
      in.timestep_cond = nn::timestep_embedding((c.at(kGuidance) - 1.0) * 1000.0, *unet_.time_cond_proj_dim, false, 1);
    in = with_adapters(models, with_controls(models, in, c), c);
    if (const std::string& field = spec().inpainting; !field.empty()) {
      check(c.contains(field), Code::invalid_config,
            "this UNet takes {} channels: it is an inpainting model, which takes a mask and the masked image; expected "
            "{}, "
            "as in text to image",
            unet_.in_channels, x.dim(-1));
      in.sample = concatenate({x, cast(c.at(field), x.dtype())}, -1);
    }
    return unet2d(models(kUNet), unet_, in);
  }

  Conditioning extra_conditioning(Graph& g, int64_t batch, const SampleSettings& settings) const override {
    Conditioning extra;
    if (unet_.time_cond_proj_dim) extra[kGuidance] = broadcast_to(settings.embedded_guidance, {batch});
    if (!micro()) return extra;
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
    extra[kSizes] =
        columns == kScored ? constant(g, all) : broadcast_to(constant(g, rows(all, 0, 1)), {batch, columns});
    return extra;
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
  /// The UNet's inputs with what adapters make of images.
  UNetInputs with_adapters(const Models& models, const UNetInputs& in, const Conditioning& c) const {
    UNetInputs out = in;
    if (const auto tokens = c.find(kImageTokens); tokens != c.end() && ip_adapter_)
      out.image_attention = [&models, adapter = ip_adapter_, tokens = tokens->second, scale = c.at(kImageScale)](
                                const std::string& path, Tensor q) {
        const auto found = std::ranges::find(adapter->attentions, path);
        check(found != adapter->attentions.end(), Code::invalid_config,
              "scan_layers is true; expected false with ip_adapter: its weights differ by layer");
        const Tensor y = ip_adapter_attention(models(kIpAdapter), adapter->config,
                                              static_cast<size_t>(found - adapter->attentions.begin()), q, tokens);
        return y * cast(reshape(scale, {scale.dim(0), 1, 1, 1}), y.dtype());
      };
    for (size_t i = 0;; ++i) {  // of a T2I-Adapter
      const auto feature = c.find(feature_field(i));
      if (feature == c.end()) break;
      const Tensor scale = c.at(kFeatureScale);
      out.adapter_features.push_back(feature->second * reshape(scale, {scale.dim(0), 1, 1, 1}));
    }
    return out;
  }
  bool micro() const { return unet_.addition_embed_type.has_value(); }

  UNetConfig unet_;
  std::vector<ClipTextConfig> texts_;
  std::vector<ControlNetConfig> controls_;
  std::shared_ptr<const IpAdapter> ip_adapter_;
};

}  // namespace

std::shared_ptr<const Family> make_stable_diffusion(const ModelFolder& folder) {
  return std::make_shared<StableDiffusion>(folder);
}

}  // namespace md
