// FLUX.1 dev and schnell: a transformer over 2×2 patches of an autoencoder's latents and T5's encoding of the text.
// CLIP's pooled text, the timestep and, in dev, the guidance scale that it was distilled with modulate its blocks.
// Sources: Black Forest Labs 2024 (FLUX.1); Esser et al. 2024, section 5.3.2 (shift by size); Meng et al. 2023
// (distilled guidance); details as in diffusers' pipeline.
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/families/clip_encoder.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/clip_text.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/models/t5.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kClip = "text_encoder", *kT5 = "text_encoder_2", *kIds = "ids",
                     *kIds2 = "ids_2", *kPrompt = "prompt_embeds", *kPooled = "pooled_projections",
                     *kGuidance = "guidance", *kInpainting = "inpainting";

bool is_published(const FluxTransformerConfig& c) {
  const FluxTransformerConfig published;
  return c.num_layers == published.num_layers && c.num_single_layers == published.num_single_layers &&
         c.width() == published.width();
}

/// For MagCache, of FLUX.1's published size: how much the norm of what the blocks add changes from step to step,
/// measured in 28 steps by the authors of MagCache (Ma et al. 2025). Two for each step, with and without prompt, which
/// are equal; empty for other sizes.
std::vector<double> magcache_ratios(const FluxTransformerConfig& c) {
  std::vector<double> out;
  if (!is_published(c)) return out;
  for (double ratio : {1.0,     1.21094, 1.11719, 1.07812, 1.0625,  1.03906, 1.03125, 1.03906, 1.02344, 1.03125,
                       1.02344, 0.98047, 1.01562, 1.00781, 1.0,     1.00781, 1.0,     1.00781, 1.0,     1.0,
                       0.99609, 0.99609, 0.98047, 0.98828, 0.96484, 0.95703, 0.93359, 0.89062})
    out.insert(out.end(), 2, ratio);
  return out;
}

/// For TeaCache, of FLUX.1's published size: fitted by its authors (Liu et al. 2024).
std::vector<double> teacache_coefficients(const FluxTransformerConfig& c) {
  if (!is_published(c)) return {};
  return {4.98651651e+02, -2.83781631e+02, 5.58554382e+01, -3.82021401e+00, 2.64230861e-01};
}

FamilySpec flux_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<FluxTransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder("vae");
  const auto& clip = folder.config<ClipTextConfig>(kClip);
  const auto& t5 = folder.config<T5Config>(kT5);
  const auto length = folder.option<int64_t>("max_sequence_length", 512);
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {clip_encoder_spec(folder, kClip, "tokenizer"),
                        {.component = kT5,
                         .tokenizer = folder.tokenizer("tokenizer_2"),
                         .ids = kIds2,
                         .max_tokens = length,
                         .second_prompt = true,
                         .lora_targets = kT5LoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, t5.d_model}}}, {kPooled, {DType::f32, {clip.hidden_size}}}},
      .embedded_guidance = true,
      .true_guidance = true,
      .patch = kLatentPatch,
      .even_flow_steps = true,
      .sample_defaults = transformer.guidance_embeds ? SampleDefaults{.num_inference_steps = 28, .guidance_scale = 3.5}
                                                     : SampleDefaults{.num_inference_steps = 4, .guidance_scale = 0},
      .magcache_ratios = [transformer](const MediaSize&, bool) { return magcache_ratios(transformer); },
      .teacache_coefficients = [transformer](const MediaSize&, bool) { return teacache_coefficients(transformer); },
      .image_to_image = ImageToImage{.strength = 0.6, .inpaint_strength = 0.6, .runs_begun_steps = true},
      .blocks = "transformer_blocks",
      .block_count = transformer.num_layers,
      .axis_rules = kFluxAxisRules,
      // All blocks, including feed-forward layers, as in diffusers' training scripts.
      .lora = {.targets = {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
                           "attn.add_v_proj", "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj",
                           "ff_context.net.2"},
               .kohya_version = "flux1",
               .ends_are_blocks = true},
      .single_file = {.prefixes = {{kTransformer, ""}}},
      .records = flux_records(),
      .reference = reference_conventions(folder)};
  spec.text_encoders[0].ids = kIds, spec.text_encoders[0].pooled = true;
  const int64_t packed_channels = vae->channels * kLatentPatch * kLatentPatch;
  // FLUX.1 Fill sees the masked image and the mask's pixels.
  const int64_t filling = (2 * vae->channels + vae->downscale * vae->downscale) * kLatentPatch * kLatentPatch;
  const bool fills = transformer.in_channels == filling;
  check(
      (transformer.in_channels == packed_channels || fills) && transformer.patch_size == 1, Code::invalid_config,
      "transformer: in_channels is {} and patch_size {}; expected {}, as the autoencoder's latents give, or {}, with a "
      "mask and the masked image, and 1: models that take other images next to the latents are not supported",
      transformer.in_channels, transformer.patch_size, packed_channels, filling);
  if (fills) {
    spec.inpainting = kInpainting, spec.inpainting_sees_pixels = true;
    spec.image_to_image->inpaint_strength = 1;
  }
  check(transformer.joint_attention_dim == t5.d_model, Code::invalid_config,
        "transformer: joint_attention_dim is {}; expected {}, the width of text_encoder_2",
        transformer.joint_attention_dim, t5.d_model);
  check(transformer.pooled_projection_dim == clip.hidden_size, Code::invalid_config,
        "transformer: pooled_projection_dim is {}; expected {}, the width of text_encoder",
        transformer.pooled_projection_dim, clip.hidden_size);
  check(length > 1, Code::invalid_config, "max_sequence_length is {}; expected 2 or more", length);
  return spec;
}

class Flux final : public Family {
 public:
  explicit Flux(const ModelFolder& folder)
      : Family(flux_spec(folder)),
        transformer_(folder.config<FluxTransformerConfig>(kTransformer)),
        clip_(clip_config(folder, spec().text_encoders[0])),
        t5_(folder.config<T5Config>(kT5)) {}

  /// T5 attends to the padding, as in these models' training. Only the pooled last layer of CLIP is used.
  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t /*clip_skip*/) const override {
    return {{kPrompt, t5_encoder(models(kT5), t5_, text.at(kIds2))},
            {kPooled, cast(clip_text(models(kClip), clip_, text.at(kIds)).pooled, DType::f32)}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    const int64_t rows = x.dim(1) / kLatentPatch, columns = x.dim(2) / kLatentPatch;
    Tensor patches = to_latent_patches(x);
    if (const std::string& field = spec().inpainting; !field.empty()) {
      check(c.contains(field), Code::invalid_config,
            "this transformer takes {} channels: it is FLUX.1 Fill, which takes a mask and the masked image",
            transformer_.in_channels);
      const Tensor seen = cast(c.at(field), x.dtype());
      const int64_t mask = spec().mask_channels();
      patches = concatenate({patches, to_latent_patches(slice_axis(seen, -1, mask, seen.dim(-1))),
                             to_latent_patches(slice_axis(seen, -1, 0, mask))},
                            -1);
    }
    FluxInputs in{.sample = reshape(patches, {x.dim(0), rows * columns, patches.dim(3)}),
                  .rows = rows,
                  .columns = columns,
                  .timestep = cast(t, DType::f32),
                  .text = c.at(kPrompt),
                  .pooled = c.at(kPooled),
                  .reuse = options.reuse};
    if (transformer_.guidance_embeds) in.guidance = c.at(kGuidance);
    Tensor y = flux_transformer(models(kTransformer), transformer_, in);
    return from_latent_patches(reshape(y, {x.dim(0), rows, columns, y.dim(2)}));
  }
  Conditioning extra_conditioning(Graph&, int64_t batch, const SampleSettings& settings) const override {
    if (!transformer_.guidance_embeds) return {};
    return {{kGuidance, broadcast_to(settings.embedded_guidance, {batch})}};
  }

 private:
  FluxTransformerConfig transformer_;
  ClipTextConfig clip_;
  T5Config t5_;
};

}  // namespace

std::shared_ptr<const Family> make_flux(const ModelFolder& folder) { return std::make_shared<Flux>(folder); }

}  // namespace md
