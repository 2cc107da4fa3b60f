// Facts about a family's models, known when the folder is opened and before anything is computed. Computation on
// tensors is in family.h. Tensors have the batch (B) on axis 0; shapes of fields leave it out.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/families/record_format.h"
#include "maxdiffusion/families/reference_conventions.h"
#include "maxdiffusion/models/autoencoder.h"
#include "maxdiffusion/tokenizers/placeholders.h"
#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

class ImageAdapter;  // family.h

/// A named array of one sample.
struct Field {
  std::string name;
  Shape shape;
};

/// How a caption is tokenized, and the component that reads the tokens.
struct TextEncoderSpec {
  std::string component;                       // "text_encoder"; empty: the denoiser reads the tokens
  std::shared_ptr<const Tokenizer> tokenizer;  // null after ModelFolder::from_texts
  std::string ids = "ids", mask = {};          // names of fields, s32 [max_tokens]; mask: 0 for padding; empty: none
  int64_t max_tokens = 0;                      // including template_tokens
  int64_t template_tokens = 0;  // tokens that `prepare` adds before every caption; the conditioning omits their rows
  bool second_prompt = false;   // encodes the key prompt_2, if set
  bool pooled = false;          // only its pooled output is used, so truncation is not logged
  std::vector<int64_t> layers = {};  // layers whose outputs are used, if text_encoder_out_layers selects them
  std::function<std::string(const std::string&)> prepare = {};  // changes the caption before it is tokenized
  /// Width of its tokens' embeddings, to which learned ones may be added (textual inversion); 0: they may not.
  int64_t embedding_width = 0;
  std::vector<Placeholder> placeholders = {};  // words that mean these
  /// Suffixes of the layers that get LoRA matrices unless a key names others.
  std::vector<std::string> lora_targets = {"q_proj", "k_proj", "v_proj", "out_proj"};
};

/// Names and choice of the denoiser's layers in LoRA files.
struct LoraSpec {
  std::vector<std::string> targets = {"to_k", "to_q", "to_v", "to_out.0"};  // as TextEncoderSpec::lora_targets
  bool original_names = false;     // files for other programs have the original program's names (ComfyUI's layout), or
                                   // else the published ones (kohya's)
  std::string kohya_version = {};  // the model's name in kohya's metadata: "sd_v1"; empty: unknown to kohya
  bool ends_are_blocks = false;    // LoraBlocks: with_ends
};

/// A file that holds several models in the original program's layout.
struct SingleFile {
  std::map<std::string, std::string> prefixes;  // component → prefix of its names; empty: no such files exist
  HostArrays extra_tensors = {};                // further tensors, which identify the model
};

/// Image-to-image sampling: samples begin with an image's latents, with the noise of a step after the first. Values are
/// those of diffusers' pipelines of the same models.
struct ImageToImage {
  double strength = 0.8;        // fraction of the steps that run, if no key sets it
  double inpaint_strength = 1;  // the same with a mask
  /// strength with a ControlNet and without a mask, and weights of a ControlNet without and with a mask.
  std::optional<double> control_strength = {};
  double control_scale = 0.8, control_inpaint_scale = 0.5;
  bool runs_begun_steps = false;  // whether a step that strength covers only in part runs
  bool mask_of_middle = false;    // a cell's mask is the mean of its four central pixels, not its first pixel
  /// Index of the first of `steps` steps that runs; `steps` if none does.
  int64_t first_step(int64_t steps, double strength) const;
};

/// Names of the ControlNet `i`: component, and conditioning fields: the image, f32 [H, W, 3] in [0, 1], and the factor
/// of its residuals, f32 [].
std::string control_component(size_t i);
std::string control_image_field(size_t i);
std::string control_scale_field(size_t i);

/// What is sampled from a model that no config describes. Values are those of diffusers' pipelines and of the models'
/// published pages.
struct SampleDefaults {
  int64_t height = 1024, width = 1024;  // pixels
  int64_t num_inference_steps = 50;
  /// The key guidance_scale, or true_cfg_scale if that is the only factor of guidance.
  double guidance_scale = 5;
};

struct FamilySpec {
  /// Denoiser components, from noisy to clean; usually one. A run's weights have the first one's name.
  std::vector<std::string> denoisers;
  /// With two denoisers: the second predicts for times below this fraction of all times.
  std::optional<double> boundary_ratio = {};
  std::shared_ptr<const Autoencoder> autoencoder = std::make_shared<const Autoencoder>();
  std::vector<TextEncoderSpec> text_encoders = {};
  std::vector<Field> conditioning = {};       // fields of one encoded caption: "prompt_embeds", f32 [L, D]
  std::vector<Field> size_conditioning = {};  // fields of one sample's sizes: "time_ids", f32 [6]
  /// A field s32 [] of `conditioning`: the number of rows of its fields [L, D] that are tokens. The other rows are
  /// padding, and predictions do not depend on them or on their number. Empty: all rows are used.
  std::string text_lengths = {};
  /// Rows of fields [L, D] behind a text's tokens are zeros, and no other row depends on padding: texts are encoded at
  /// the length_of_programs() of the longest, and zeros are appended.
  bool zero_text_padding = false;
  /// For CLIP text encoders: the width of each one's part of the first field of `conditioning`, [L, D], in order; long
  /// texts are chunks of L rows. Empty: other encoders.
  std::vector<int64_t> chunk_widths = {};
  /// Field s32 [] next to the first one where texts of a batch have unequal numbers of chunks: the rows that are
  /// tokens.
  static constexpr const char* kChunkRows = "prompt_rows";
  int64_t most_clip_skip = 0;      // number of the text encoders' last layers that clip_skip may skip
  bool zero_empty_prompt = false;  // without a negative prompt, unconditional embeddings are 0, not the empty text's
  /// guidance_scale is an input of the denoiser, which is distilled to predict the guided output.
  bool embedded_guidance = false;
  bool unguided_only = false;  // distilled to few steps without guidance: guidance_scale has no effect
  /// true_cfg_scale, not guidance_scale, is the factor of classifier-free guidance.
  bool true_guidance = false;
  /// Computes the final prediction from the guided one and the one of the prompt alone, latents f32 [B, …]; empty: the
  /// guided one.
  std::function<Tensor(Tensor guided, Tensor positive)> after_guidance = {};
  /// The guidance_scale that turns guidance off: 1 if predictions are negative + scale · (positive − negative), 0 if
  /// they are positive + scale · (positive − negative).
  double unguided = 1;
  int64_t patch = 1, frame_patch = 1;  // sides and frames of latents are multiples of these
  int64_t training_patch = 0;          // sides of training images' latents are multiples of this; 0: patch
  bool even_flow_steps = false;        // SampleFacts::even_flow_steps of the published pipeline
  /// SampleFacts::log_shift for a number of tokens of a sample and of steps; empty: none.
  std::function<double(int64_t tokens, int64_t steps)> log_shift = {};
  int64_t default_frames = 1;  // frames of media if no key sets them
  SampleDefaults sample_defaults = {};
  /// For use_magcache: measured ratios, two for each step, with and without prompt; empty: not measured.
  std::function<std::vector<double>(const MediaSize&, bool images)> magcache_ratios = {};
  /// For use_teacache: the fitted polynomial, that of the highest power first; empty: none was fitted.
  std::function<std::vector<double>(const MediaSize&, bool images)> teacache_coefficients = {};
  std::optional<ImageToImage> image_to_image = ImageToImage{};  // absent: samples begin with noise only
  /// Name of the conditioning field, f32 [h, w, mask_channels + C], of a denoiser that was trained to inpaint: the mask
  /// (1: generated), then the scaled latents of the image without the masked part. Empty: there is none.
  std::string inpainting = {};
  bool inpainting_sees_pixels = false;  // the mask of a cell is that of all its pixels, row by row
  /// Paths of the denoiser's self attentions, in order, that guidance may perturb (nn/perturbation.h).
  std::vector<std::string> self_attentions = {};
  /// Path of the denoiser's sequence of blocks, some of which guidance may skip and caches may reuse (StepReuse), and
  /// the number of blocks; empty: the denoiser is not a sequence of blocks.
  std::string blocks = {};
  int64_t block_count = 0;
  /// Components of ControlNets, each with an image (control_image_field) and a weight in each step.
  std::vector<std::string> controlnets = {};
  std::vector<std::shared_ptr<const ImageAdapter>> image_adapters = {};  // those of the folder
  int64_t up_layers = 0;   // of a UNet: the number of its skip connections, down to which deep levels may be reused
  bool has_freeu = false;  // the denoiser reads PredictOptions::freeu
  std::string axis_rules = {};  // default of logical_axis_rules; empty: AxisRules::defaults()
  LoraSpec lora = {};
  SingleFile single_file = {};
  std::shared_ptr<const RecordFormat> records = moment_records();
  ReferenceConventions reference = {};

  const std::string& denoiser() const { return denoisers.front(); }
  bool videos() const { return autoencoder->frame_scale > 0; }
  int64_t mask_channels() const { return inpainting_sees_pixels ? autoencoder->downscale * autoencoder->downscale : 1; }
  /// Both sides of training images are multiples of this, in pixels.
  int64_t size_multiple() const { return autoencoder->downscale * std::max(patch, training_patch); }
  /// Components that encode captions, in order.
  std::vector<std::string> text_components() const;
  /// Fields of one tokenized caption. `rows`: their length after template_tokens; 0: max_tokens in all.
  std::vector<Field> text_fields(int64_t rows = 0) const;
  /// The fields of text encoders that read the key prompt_2.
  std::vector<std::string> second_text_fields() const;
  std::vector<std::string> lora_targets(const std::string& component) const;
  /// The next of 64, 128, 256, …: few programs are compiled for texts of any length.
  static int64_t length_of_programs(int64_t longest);
  /// Rows that fields [L, D] need for texts of `longest` tokens: length_of_programs(), at most L. L without
  /// text_lengths. `of_images`: number of tokens that are of images; they add rows_of_images.
  int64_t text_rows(int64_t longest, int64_t of_images = 0) const;
  /// Rows for tokens of images: rounded up to a multiple of 64.
  static int64_t rows_of_images(int64_t tokens) { return (tokens + 63) / 64 * 64; }
  /// Conditioning of N texts, with its fields [N, L, D] truncated or zero-padded to `rows`.
  HostArrays with_text_rows(HostArrays fields, int64_t rows) const;
};

}  // namespace md
