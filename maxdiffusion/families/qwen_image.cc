// Qwen-Image: a transformer over pairs of rows and columns of an autoencoder's latents and over what a language model,
// Qwen2.5-VL without its image encoder, makes of the text in a template that asks for a description. The autoencoder is
// Wan 2.1's. Sources: Qwen-Image Team 2025; Esser et al. 2024, section 5.3.2 (shift by size); details as in diffusers'
// pipeline.
#include <nlohmann/json.hpp>

#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/models/flux_transformer.h"
#include "maxdiffusion/models/latent_patches.h"
#include "maxdiffusion/models/qwen_image_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kEncoder = "text_encoder", *kIds = "ids", *kMask = "mask",
                     *kPrompt = "prompt_embeds", *kLengths = "prompt_lengths";
// As when the model was trained: tokens of the text before the prompt, and most of those behind them.
constexpr int64_t kTemplateTokens = 34, kMostTokens = 1024;

std::string in_template(const std::string& prompt) {
  return "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
         "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n" +
         prompt + "<|im_end|>\n<|im_start|>assistant\n";
}

/// What guidance gave, each token with the norm of the prediction for the prompt alone.
Tensor with_norms(Tensor guided, Tensor positive) {
  auto norm = [](Tensor tokens) { return sqrt(sum(square(tokens), {3}, true)); };
  Tensor y = to_latent_patches(guided);
  return from_latent_patches(y * (norm(to_latent_patches(positive)) / norm(y)));
}

FamilySpec qwen_image_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<QwenImageTransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder("vae");
  const auto& encoder = folder.config<Qwen25VlConfig>(kEncoder);
  const auto length = folder.option<int64_t>("max_sequence_length", 512);
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {{.component = kEncoder,
                         .tokenizer = folder.tokenizer("tokenizer"),
                         .ids = kIds,
                         .mask = kMask,
                         .max_tokens = kTemplateTokens + length,
                         .template_tokens = kTemplateTokens,
                         .prepare = in_template,
                         .lora_targets = kDecoderLoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, encoder.hidden_size}}}, {kLengths, {DType::s32, {}}}},
      .text_lengths = kLengths,
      .true_guidance = true,
      .after_guidance = with_norms,
      .patch = kLatentPatch,
      .even_flow_steps = true,
      .axis_rules = kFluxAxisRules,
      .lora = {.targets = {"to_q", "to_k", "to_v", "to_out.0"}},
      .single_file = {.prefixes = {{kTransformer, ""}}},
      .reference = reference_conventions(folder)};
  const int64_t token = vae->channels * kLatentPatch * kLatentPatch;
  check(transformer.in_channels == token && transformer.token_channels() == token &&
            transformer.patch_size == kLatentPatch,
        Code::invalid_config,
        "{}: the transformer takes tokens of {} channels ('in_channels') and gives tokens of {}; the autoencoder's "
        "latents make tokens of {}",
        folder.path(), transformer.in_channels, transformer.token_channels(), token);
  check(!transformer.zero_cond_t, Code::invalid_config,
        "{}: the transformer is of Qwen-Image-Edit ('zero_cond_t'), which is not supported", folder.path());
  check(transformer.joint_attention_dim == encoder.hidden_size, Code::invalid_config,
        "{}: the transformer takes texts of {} features ('joint_attention_dim'), the text encoder gives {} "
        "('hidden_size'); give it the text encoder that it was trained with",
        folder.path(), transformer.joint_attention_dim, encoder.hidden_size);
  check(length > 0 && length <= kMostTokens, Code::invalid_config, "max_sequence_length is {}; expected 1 to {}",
        length, kMostTokens);
  return spec;
}

class QwenImage final : public Family {
 public:
  explicit QwenImage(const ModelFolder& folder)
      : Family(qwen_image_spec(folder)),
        transformer_(folder.config<QwenImageTransformerConfig>(kTransformer)),
        encoder_(folder.config<Qwen25VlConfig>(kEncoder)) {}

  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const override {
    check(clip_skip == 0, Code::invalid_config, "clip_skip is {}, but this text encoder has no other layer to read",
          clip_skip);
    Tensor states =
        decoder_hidden_states(models(kEncoder), encoder_, text.at(kIds), {encoder_.num_hidden_layers}).front();
    Tensor tokens = sum(text.at(kMask), {1}) - kTemplateTokens;
    return {{kPrompt, cast(slice_axis(states, 1, kTemplateTokens, states.dim(1)), DType::f32)},
            {kLengths, maximum(tokens, scalar_like(tokens, 0))}};
  }

  Prediction predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                     const PredictOptions&) const override {
    Tensor patches = to_latent_patches(x);
    const int64_t batch = x.dim(0), rows = patches.dim(1), columns = patches.dim(2);
    Tensor y = qwen_image_transformer(models(kTransformer), transformer_,
                                      {.sample = reshape(patches, {batch, rows * columns, patches.dim(3)}),
                                       .rows = rows,
                                       .columns = columns,
                                       .timestep = cast(t, DType::f32),
                                       .text = c.at(kPrompt),
                                       .lengths = c.at(kLengths)});
    return {from_latent_patches(reshape(y, {batch, rows, columns, y.dim(2)})), {}};
  }

 private:
  QwenImageTransformerConfig transformer_;
  Qwen25VlConfig encoder_;
};

}  // namespace

std::shared_ptr<const Family> make_qwen_image(const ModelFolder& folder) { return std::make_shared<QwenImage>(folder); }

}  // namespace md
