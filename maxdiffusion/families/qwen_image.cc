// Qwen-Image: a transformer over 2×2 patches of an autoencoder's latents and a language model's encoding of the text,
// Qwen2.5-VL's, in a template that requests a description. The autoencoder is Wan 2.1's. Editing models have reference
// images, which are tokens next to the sample's and, through the language model's image encoder, tokens of the text.
// Sources: Qwen-Image Team 2025; Esser et al. 2024, section 5.3.2 (shift by size); details as in diffusers' pipelines.
#include <cmath>
#include <nlohmann/json.hpp>

#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parse_json.h"
#include "maxdiffusion/families/family.h"
#include "maxdiffusion/media/image_processor.h"
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
constexpr int64_t kMostTokens = 1024;  // of a prompt

/// Differences between the models, as in their training.
struct Variant {
  std::string_view pipeline;  // prefix of its class
  std::string_view request;   // instruction in the template
  int64_t template_tokens;    // before the prompt
  int64_t prompt_tokens;      // default
  int64_t references = 0;     // largest number of reference images; if above 0, at least one is required
  int64_t seen_side = 0;      // side of a square with the text encoder's number of pixels; 0: the autoencoder's
  bool numbered = false;      // the text numbers them: "Picture 1", …
};
constexpr std::string_view kDescribe =
                               "Describe the image by detailing the color, shape, size, texture, quantity, text, "
                               "spatial relationships of the objects and background:",
                           kEdit =
                               "Describe the key features of the input image (color, shape, size, texture, objects, "
                               "background), then explain how the user's text instruction should alter or modify the "
                               "image. Generate a new image that meets the user's requirements while maintaining "
                               "consistency with the original input where appropriate.";
constexpr Variant kVariants[] = {
    {"QwenImageEditPlus", kEdit, 64, kMostTokens, 10, 384, true},
    {"QwenImageEdit", kEdit, 64, kMostTokens, 1},
    {"QwenImage", kDescribe, 34, 512},
};

const Variant& variant_of(const ModelFolder& folder) {
  return *std::ranges::find_if(kVariants, [&](const Variant& v) { return folder.pipeline().starts_with(v.pipeline); });
}

std::string in_template(std::string_view request, const std::string& prompt) {
  return fmt::format("<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
                     request, prompt);
}

/// The guided prediction, with each token rescaled to its norm in the prediction for the prompt alone.
Tensor with_norms(Tensor guided, Tensor positive) {
  auto norm = [](Tensor tokens) { return sqrt(sum(square(tokens), {3}, true)); };
  Tensor y = to_latent_patches(guided);
  return from_latent_patches(y * (norm(to_latent_patches(positive)) / norm(y)));
}

FamilySpec qwen_image_spec(const ModelFolder& folder) {
  const auto& transformer = folder.config<QwenImageTransformerConfig>(kTransformer);
  const std::shared_ptr<const Autoencoder> vae = folder.autoencoder("vae");
  const auto& encoder = folder.config<Qwen25VlConfig>(kEncoder);
  const Variant& variant = variant_of(folder);
  const auto length = folder.option<int64_t>("max_sequence_length", variant.prompt_tokens);
  FamilySpec spec = {
      .denoisers = {kTransformer},
      .autoencoder = vae,
      .text_encoders = {{.component = kEncoder,
                         .tokenizer = folder.tokenizer("tokenizer"),
                         .ids = kIds,
                         .mask = kMask,
                         .max_tokens = variant.template_tokens + length,
                         .template_tokens = variant.template_tokens,
                         .prepare =
                             [&variant](const std::string& prompt) { return in_template(variant.request, prompt); },
                         .lora_targets = kDecoderLoraTargets}},
      .conditioning = {{kPrompt, {DType::f32, {length, encoder.hidden_size}}}, {kLengths, {DType::s32, {}}}},
      .text_lengths = kLengths,
      .true_guidance = true,
      .after_guidance = with_norms,
      .patch = kLatentPatch,
      .even_flow_steps = true,
      .sample_defaults = {.guidance_scale = 4},
      .image_to_image = ImageToImage{.strength = 0.6, .inpaint_strength = 0.6, .runs_begun_steps = true},
      .blocks = "transformer_blocks",
      .block_count = transformer.num_layers,
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
  check(!transformer.zero_cond_t || variant.references > 0, Code::invalid_config,
        "{}: the transformer is of Qwen-Image-Edit ('zero_cond_t'), the pipeline is {}; expected "
        "QwenImageEditPlusPipeline",
        folder.path(), folder.pipeline());
  check(transformer.joint_attention_dim == encoder.hidden_size, Code::invalid_config,
        "{}: the transformer expects text embeddings of {} features ('joint_attention_dim'), the text encoder gives {} "
        "('hidden_size'); give it the text encoder that it was trained with",
        folder.path(), transformer.joint_attention_dim, encoder.hidden_size);
  check(length > 0 && length <= kMostTokens, Code::invalid_config, "max_sequence_length is {}; expected 1 to {}",
        length, kMostTokens);
  return spec;
}

ImageProcessor processor_of(const ModelFolder& folder) {
  for (const char* name : {"processor/preprocessor_config.json", "processor/processor_config.json"}) {
    const auto file = folder.files().find(name);
    if (file == folder.files().end()) continue;
    nlohmann::json config = parse_json_or_discard(file->second);  // the second format has the values of all parts
    if (config.contains("image_processor")) config = config["image_processor"];
    const ImageProcessor processor = ImageProcessor::from_json(config);
    check(processor.area && processor.do_resize, Code::invalid_config,
          "{}/{}: it prepares images of one size ('merge_size', 'do_resize'); expected Qwen2VLImageProcessor",
          folder.path(), name);
    return processor;
  }
  fail(Code::invalid_config,
       "{}: no processor/preprocessor_config.json; a {} needs it, and \"processor\": [\"transformers\", "
       "\"Qwen2VLProcessor\"] in model_index.json",
       folder.path(), folder.pipeline());
}

/// Reference images with as many pixels as a square of a given side, and sides that are multiples of 32.
class QwenReferences final : public ReferenceImages {
 public:
  QwenReferences(const ModelFolder& folder, const Variant& variant, std::shared_ptr<const Tokenizer> tokenizer)
      : variant_(&variant),
        tokenizer_(std::move(tokenizer)),
        side_(folder.option<int64_t>("reference_resolution", 1024)),
        processor_(processor_of(folder)),
        encoder_(folder.config<Qwen25VlConfig>(kEncoder)) {
    min_images = 1, max_images = variant.references;
    check(encoder_.vision.has_value(), Code::invalid_config,
          "{}/text_encoder/config.json: no 'vision_config'; expected one: this model's text encoder sees images",
          folder.path());
    check(encoder_.vision->out_hidden_size == encoder_.hidden_size, Code::invalid_config,
          "{}/text_encoder/config.json: 'vision_config' has 'out_hidden_size' {}; expected 'hidden_size' = {}",
          folder.path(), encoder_.vision->out_hidden_size, encoder_.hidden_size);
    unit_ = encoder_.vision->token_size();
    check(processor_.area->multiple == unit_, Code::invalid_config,
          "{}/processor: tokens of {} pixels a side ('patch_size' times 'merge_size'); expected {}, as in the text "
          "encoder's 'vision_config'",
          folder.path(), processor_.area->multiple, unit_);
  }

  Fitted fitted(const MediaSize& image) const override {
    const MediaSize size = scaled(image, side_);
    return {size, size};
  }
  MediaSize sample_size(const std::vector<MediaSize>& images) const override { return fitted(images.back()).cropped; }
  Seen seen(const std::vector<MediaSize>& images) const override {
    Seen s;
    for (size_t i = 0; i < images.size(); ++i) {
      const MediaSize first = first_size(images[i]);
      const ImageSize last = processor_.resized({first.height, first.width});
      s.sizes.push_back({last.height, last.width});
      s.text += head(i);
      const int64_t tokens = tokens_of(s.sizes[i].height, s.sizes[i].width);
      for (int64_t k = 0; k < tokens; ++k) s.text += "<|image_pad|>";
      s.text += "<|vision_end|>";
      s.tokens += head_tokens(i) + tokens + 1;
    }
    return s;
  }
  HostArray pixels(const HostArray& image) const override {
    const MediaSize first = first_size({image.dims()[0], image.dims()[1]});
    return processor_.apply(resize_rgb8(image, first.height, first.width, Filter::lanczos));
  }
  Tensor features(const Models& models, Tensor pixels) const override {
    return cast(image_in_text(models(kEncoder), encoder_, pixels), DType::f32);
  }
  /// The images' features with the index of their first tokens, in a text whose images start at `at`.
  std::vector<ImageInText> places(const std::vector<Tensor>& images, int64_t at) const {
    std::vector<ImageInText> places;
    for (size_t i = 0; i < images.size(); ++i) {
      at += head_tokens(i);
      places.push_back({images[i], at});
      at += images[i].dim(1) * images[i].dim(2) + 1;
    }
    return places;
  }

 private:
  /// Sides of a rectangle of this aspect ratio with side² pixels, each rounded to the nearest multiple.
  static MediaSize scaled(const MediaSize& image, int64_t side) {
    constexpr int64_t kMultiple = 32, kMostAspect = 200;
    const auto [least, most] = std::minmax(image.height, image.width);
    check(most <= kMostAspect * least, Code::invalid_config,
          "image: a reference of {}x{} pixels; expected a side at most {} times as long as the other", image.height,
          image.width, kMostAspect);
    const double ratio = static_cast<double>(image.width) / static_cast<double>(image.height),
                 width = std::sqrt(static_cast<double>(side * side) * ratio);
    const auto nearest = [&](double pixels) {
      return std::max(static_cast<int64_t>(std::nearbyint(pixels / kMultiple)), int64_t{1}) * kMultiple;
    };
    const MediaSize size{nearest(width / ratio), nearest(width)};
    if (most < kMultiple)
      log_line_once(LogLevel::warning, fmt::format("image: a reference of {}x{} pixels is enlarged to {}x{}",
                                                   image.height, image.width, size.height, size.width));
    return size;
  }
  /// The input size of the text encoder's image processor.
  MediaSize first_size(const MediaSize& image) const {
    return scaled(image, variant_->seen_side ? variant_->seen_side : side_);
  }
  int64_t tokens_of(int64_t height, int64_t width) const { return height / unit_ * (width / unit_); }
  /// The text before the tokens of image i.
  std::string head(size_t i) const {
    return (variant_->numbered ? fmt::format("Picture {}: ", i + 1) : "") + "<|vision_start|>";
  }
  int64_t head_tokens(size_t i) const {
    constexpr int64_t kMost = 64;
    if (tokenizer_) return std::ssize(tokenizer_->tokens(head(i), kMost));
    return variant_->numbered ? (i < 9 ? 6 : 7) : 1;  // numbers of tokens in the published processor
  }

  const Variant* variant_;
  std::shared_ptr<const Tokenizer> tokenizer_;  // null after ModelFolder::from_texts
  int64_t side_, unit_ = 0;                     // pixels: side of a square with an image's area; side of a token
  ImageProcessor processor_;
  Qwen25VlConfig encoder_;
};

class QwenImage final : public Family {
 public:
  explicit QwenImage(const ModelFolder& folder)
      : Family(qwen_image_spec(folder)),
        transformer_(folder.config<QwenImageTransformerConfig>(kTransformer)),
        encoder_(folder.config<Qwen25VlConfig>(kEncoder)) {
    if (const Variant& variant = variant_of(folder); variant.references > 0)
      references_.emplace(folder, variant, spec().text_encoders[0].tokenizer);
  }

  Conditioning encode_text(const Models& models, const Conditioning& text, int64_t /*clip_skip*/) const override {
    const int64_t before = spec().text_encoders[0].template_tokens;
    std::vector<ImageInText> images;
    if (references_) images = references_->places(ReferenceImages::seen_of(text), before);
    Tensor states =
        decoder_hidden_states(models(kEncoder), encoder_, text.at(kIds), {encoder_.num_hidden_layers}, images).front();
    Tensor tokens = sum(text.at(kMask), {1}) - before;
    return {{kPrompt, cast(slice_axis(states, 1, before, states.dim(1)), DType::f32)},
            {kLengths, maximum(tokens, scalar_like(tokens, 0))}};
  }

  Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& c,
                 const PredictOptions& options) const override {
    const QwenImageTokens sample = tokens_of(x);
    QwenImageInputs in{.sample = sample.tokens,
                       .rows = sample.rows,
                       .columns = sample.columns,
                       .timestep = cast(t, DType::f32),
                       .text = c.at(kPrompt),
                       .lengths = c.at(kLengths),
                       .reuse = options.reuse};
    for (const Tensor& reference : ReferenceImages::fields_in(c)) in.references.push_back(tokens_of(reference));
    Tensor y = qwen_image_transformer(models(kTransformer), transformer_, in);
    return from_latent_patches(reshape(y, {x.dim(0), sample.rows, sample.columns, y.dim(2)}));
  }
  const ReferenceImages* reference_images() const override { return references_ ? &*references_ : nullptr; }

 private:
  static QwenImageTokens tokens_of(Tensor latents) {
    Tensor patches = to_latent_patches(latents);
    const int64_t rows = patches.dim(1), columns = patches.dim(2);
    return {reshape(patches, {patches.dim(0), rows * columns, patches.dim(3)}), rows, columns};
  }

  QwenImageTransformerConfig transformer_;
  Qwen25VlConfig encoder_;
  std::optional<QwenReferences> references_;
};

}  // namespace

std::shared_ptr<const Family> make_qwen_image(const ModelFolder& folder) { return std::make_shared<QwenImage>(folder); }

}  // namespace md
