// FLUX.2-klein: a transformer over patches of an autoencoder's latents and the hidden states of three layers of a
// language model, Qwen3, for the text in its chat template, including padding. Reference images are tokens next to the
// sample's. Source: Black Forest Labs 2025 (FLUX.2); details as in diffusers' pipeline.
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/models/flux2_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kEncoder = "text_encoder", *kIds = "ids", *kMask = "mask",
                     *kPrompt = "prompt_embeds", *kGuidance = "guidance";

/// The logarithm of the shift, fitted to measurements by number of image tokens and of sampling steps: linear in both;
/// for large images, linear in the tokens only.
double empirical_shift(int64_t tokens, int64_t steps) {
  constexpr double kLarge = 4300, kFew = 10, kMany = 200;  // tokens; steps
  const auto n = static_cast<double>(tokens);
  const double of_many = 0.00016927 * n + 0.45666666, of_few = 8.73809524e-05 * n + 1.89833333;
  if (n > kLarge) return of_many;
  const double slope = (of_many - of_few) / (kMany - kFew);
  return of_many + slope * (static_cast<double>(steps) - kMany);
}

/// Layers of the text encoder whose hidden states are used, numbered as in transformers.
std::vector<int64_t> layers_of(const ModelFolder& folder) {
  return folder.option("text_encoder_out_layers", std::vector<int64_t>{9, 18, 27});
}

FamilySpec flux2_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<Flux2TransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder("vae");
  const auto& qwen3 = folder.config<Qwen3Config>(kEncoder);
  const auto length = folder.option<int64_t>("max_sequence_length", 512);
  const bool distilled = folder.option("is_distilled", false);
  const std::vector<int64_t> layers = layers_of(folder);
  const int64_t features = std::ssize(layers) * qwen3.hidden_size;
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {{.component = kEncoder,
                         .tokenizer = folder.tokenizer("tokenizer"),
                         .ids = kIds,
                         .mask = kMask,
                         .max_tokens = length,
                         .layers = layers,
                         .prepare = [](const std::string& prompt) { return qwen3_chat(prompt, false); },
                         .lora_targets = kDecoderLoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, features}}}},
      .unguided_only = distilled,
      .even_flow_steps = true,
      .log_shift = empirical_shift,
      .sample_defaults = {.num_inference_steps = distilled ? 4 : 50, .guidance_scale = 4},
      .image_to_image = ImageToImage{.inpaint_strength = 0.8, .runs_begun_steps = true, .mask_of_middle = true},
      .blocks = "transformer_blocks",
      .block_count = transformer.num_layers,
      .axis_rules = kFlux2AxisRules,
      .lora = {.targets = {"to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj", "attn.to_out"}},
      .single_file = {.prefixes = {{kTransformer, ""}}},
      .reference = reference_conventions(folder)};
  check(transformer.in_channels == vae->channels, Code::invalid_config,
        "the transformer takes latents of {} channels, the autoencoder makes {}", transformer.in_channels,
        vae->channels);
  for (const int64_t layer : layers)
    check(layer >= 0 && layer <= qwen3.num_hidden_layers, Code::invalid_config,
          "text_encoder_out_layers holds {}; the text encoder of {} has {} layers", layer, folder.path(),
          qwen3.num_hidden_layers);
  check(transformer.joint_attention_dim == features, Code::invalid_config,
        "{}: the transformer expects text embeddings of {} features ('joint_attention_dim'), {} layers of the text "
        "encoder give "
        "{} ({} times 'hidden_size' {}); give it the text encoder that it was trained with",
        folder.path(), transformer.joint_attention_dim, layers.size(), features, layers.size(), qwen3.hidden_size);
  check(length > 0, Code::invalid_config, "max_sequence_length is {}; expected 1 or more", length);
  return spec;
}

/// Reference images of at most `side` × `side` pixels each, cropped to sizes that patches divide.
class Flux2References final : public ReferenceImages {
 public:
  Flux2References(int64_t multiple, int64_t side)
      : multiple_(multiple), most_(static_cast<double>(side) * static_cast<double>(side)) {}

  Fitted fitted(const MediaSize& size) const override {
    constexpr int64_t kLeast = 64, kMostAspect = 8;
    const auto [least, most] = std::minmax(size.height, size.width);
    check(least >= kLeast, Code::invalid_config, "image: a reference of {}x{} pixels; expected {} or more a side",
          size.height, size.width, kLeast);
    check(most <= kMostAspect * least, Code::invalid_config,
          "image: a reference of {}x{} pixels; expected a side at most {} times as long as the other", size.height,
          size.width, kMostAspect);
    Fitted f{size, {}};
    const auto pixels = static_cast<double>(size.height) * static_cast<double>(size.width);
    if (pixels > most_) {
      const double scale = std::sqrt(most_ / pixels);
      f.scaled = {static_cast<int64_t>(static_cast<double>(size.height) * scale),
                  static_cast<int64_t>(static_cast<double>(size.width) * scale)};
    }
    f.cropped = {f.scaled.height / multiple_ * multiple_, f.scaled.width / multiple_ * multiple_};
    return f;
  }

 private:
  int64_t multiple_;
  double most_;
};

class Flux2 final : public Family {
 public:
  explicit Flux2(const ModelFolder& folder)
      : Family(flux2_spec(folder)),
        transformer_(folder.config<Flux2TransformerConfig>(kTransformer)),
        qwen3_(folder.config<Qwen3Config>(kEncoder)),
        layers_(layers_of(folder)),
        references_(spec().size_multiple(), folder.option<int64_t>("reference_resolution", 1024)) {}

  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t /*clip_skip*/) const override {
    const std::vector<Tensor> states =
        decoder_hidden_states(models(kEncoder), qwen3_, text.at(kIds), layers_, sum(text.at(kMask), {1}));
    return {{kPrompt, cast(concatenate(states, 2), DType::f32)}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    Flux2Inputs in{.sample = x, .timestep = t, .text = c.at(kPrompt), .reuse = options.reuse};
    if (transformer_.guidance_embeds) in.guidance = c.at(kGuidance);
    in.references = ReferenceImages::fields_in(c);
    return flux2_transformer(models(kTransformer), transformer_, in);
  }
  Conditioning extra_conditioning(Graph&, int64_t batch, const SampleSettings& settings) const override {
    if (!transformer_.guidance_embeds) return {};
    return {{kGuidance, broadcast_to(settings.embedded_guidance, {batch})}};
  }
  const ReferenceImages* reference_images() const override { return &references_; }

 private:
  Flux2TransformerConfig transformer_;
  Qwen3Config qwen3_;
  std::vector<int64_t> layers_;
  Flux2References references_;
};

}  // namespace

std::shared_ptr<const Family> make_flux2(const ModelFolder& folder) { return std::make_shared<Flux2>(folder); }

}  // namespace md
