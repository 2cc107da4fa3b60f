// Z-Image and Z-Image-Turbo: a transformer over patches of an autoencoder's latents and a language model's encoding,
// Qwen3's, of the text in its chat template. Texts of a batch may have different lengths. Sources: Alibaba Z-Image Team
// 2025; details as in diffusers' pipeline.
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/base/round_up.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/models/decoder_transformer.h"
#include "maxdiffusion/models/z_image_transformer.h"
#include "maxdiffusion/ops/elementwise.h"
#include "maxdiffusion/ops/reduce.h"
#include "maxdiffusion/ops/shape.h"

namespace md {
namespace {

constexpr const char *kTransformer = "transformer", *kEncoder = "text_encoder", *kIds = "ids", *kMask = "mask",
                     *kPrompt = "prompt_embeds", *kLengths = "prompt_lengths";
constexpr double kTimes = 1000;

FamilySpec z_image_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<ZImageTransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder("vae");
  const auto& qwen3 = folder.config<Qwen3Config>(kEncoder);
  const auto length = folder.option<int64_t>("max_sequence_length", 512);
  // Z-Image-Turbo is known by its shift, 3; Z-Image's is 6.
  const bool turbo = parse_json(folder.scheduler_config()).value("shift", 6.0) < 4;
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {{.component = kEncoder,
                         .tokenizer = folder.tokenizer("tokenizer"),
                         .ids = kIds,
                         .mask = kMask,
                         .max_tokens = length,
                         .prepare = [](const std::string& prompt) { return qwen3_chat(prompt, true); },
                         .lora_targets = kDecoderLoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, qwen3.hidden_size}}}, {kLengths, {DType::s32, {}}}},
      .text_lengths = kLengths,
      .unguided = 0,
      .patch = ZImageTransformerConfig::kPatch,
      .even_flow_steps = true,
      .sample_defaults = turbo ? SampleDefaults{.num_inference_steps = 9, .guidance_scale = 0} : SampleDefaults{},
      .image_to_image = ImageToImage{.strength = 0.6, .runs_begun_steps = true},
      .blocks = "layers",
      .block_count = transformer.n_layers,
      .axis_rules = kZImageAxisRules,
      .lora = {.targets = {"to_q", "to_k", "to_v", "to_out.0"}},
      .single_file = {.prefixes = {{kTransformer, ""}}},
      .reference = reference_conventions(folder)};
  check(transformer.in_channels == vae->channels, Code::invalid_config,
        "transformer: in_channels is {}; expected {}, the autoencoder's latent channels", transformer.in_channels,
        vae->channels);
  check(transformer.cap_feat_dim == qwen3.hidden_size, Code::invalid_config,
        "{}: the transformer expects text embeddings of {} features ('cap_feat_dim'), the text encoder gives {} "
        "('hidden_size'); "
        "give it the text encoder that it was trained with",
        folder.path(), transformer.cap_feat_dim, qwen3.hidden_size);
  check(qwen3.num_hidden_layers > 1, Code::invalid_config,
        "{}: the text encoder has {} layer; the second to last of at least 2 is read", folder.path(),
        qwen3.num_hidden_layers);
  check(length > 0 && length + kZImageTokens < transformer.axes_lens[0], Code::invalid_config,
        "max_sequence_length is {}; expected 1 to {}, for which the transformer's 'axes_lens' has places", length,
        transformer.axes_lens[0] - kZImageTokens - 1);
  return spec;
}

class ZImage final : public Family {
 public:
  explicit ZImage(const ModelFolder& folder)
      : Family(z_image_spec(folder)),
        transformer_(folder.config<ZImageTransformerConfig>(kTransformer)),
        qwen3_(folder.config<Qwen3Config>(kEncoder)) {}

  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t /*clip_skip*/) const override {
    const std::vector<Tensor> states =
        decoder_hidden_states(models(kEncoder), qwen3_, text.at(kIds), {qwen3_.num_hidden_layers - 1});
    return {{kPrompt, cast(states[0], DType::f32)}, {kLengths, sum(text.at(kMask), {1})}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    Tensor text = c.at(kPrompt);
    text = pad_end(text, 1, round_up(text.dim(1), kZImageTokens));
    Tensor y = z_image_transformer(models(kTransformer), transformer_,
                                   {.sample = x,
                                    .time = (kTimes - cast(t, DType::f32)) / kTimes,
                                    .text = text,
                                    .lengths = c.at(kLengths),
                                    .reuse = options.reuse});
    return -y;
  }

  void check_size(const MediaSize& size) const override {
    const Dims latent = spec().autoencoder->latent_dims(size);
    for (size_t i = 0; i < 2; ++i)
      check(latent[i] / spec().patch <= transformer_.axes_lens[i + 1], Code::invalid_config,
            "size {}x{} has {} {} of tokens; the transformer's 'axes_lens' has places for {}", size.height, size.width,
            latent[i] / spec().patch, i == 0 ? "rows" : "columns", transformer_.axes_lens[i + 1]);
  }

 private:
  ZImageTransformerConfig transformer_;
  Qwen3Config qwen3_;
};

}  // namespace

std::shared_ptr<const Family> make_z_image(const ModelFolder& folder) { return std::make_shared<ZImage>(folder); }

}  // namespace md
