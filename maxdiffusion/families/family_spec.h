// What a family knows of an opened model folder before anything is computed: one record of facts. What a family does
// with tensors is in family.h. Tensors have the batch (B) on axis 0; shapes of fields leave it out.
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
#include "maxdiffusion/tokenizers/tokenizer.h"

namespace md {

/// A named array of one sample.
struct Field {
  std::string name;
  Shape shape;
};

/// How a caption becomes tokens, and the component that reads them.
struct TextEncoderSpec {
  std::string component;                       // "text_encoder"; empty: the denoiser reads the tokens
  std::shared_ptr<const Tokenizer> tokenizer;  // null in a folder given as texts
  std::string ids = "ids", mask = {};          // fields, s32 [max_tokens]; mask, 0 for padding: empty: there is none
  int64_t max_tokens = 0;                      // with template_tokens
  int64_t template_tokens = 0;  // of `prepare`, the same before every caption; the conditioning has no rows for them
  bool second_prompt = false;   // reads the key prompt_2 where one is given
  bool pooled = false;          // only its pooled output is used: what it cuts is not lost
  std::vector<int64_t> layers = {};  // that are read, where text_encoder_out_layers says which
  std::function<std::string(const std::string&)> prepare = {};  // of the caption, before the tokenizer
  /// Ends of the names of the layers that get LoRA matrices where no key names any.
  std::vector<std::string> lora_targets = {"q_proj", "k_proj", "v_proj", "out_proj"};
};

/// How LoRA files name and choose the denoiser's layers.
struct LoraSpec {
  std::vector<std::string> targets = {"to_k", "to_q", "to_v", "to_out.0"};  // as TextEncoderSpec::lora_targets
  bool original_names = false;     // files for other programs have the original program's names (ComfyUI's layout), or
                                   // else the published ones (kohya's)
  std::string kohya_version = {};  // what kohya's metadata call the model: "sd_v1"; empty: kohya does not know it
};

/// A file that holds several models in the original program's layout.
struct SingleFile {
  std::map<std::string, std::string> prefixes;  // component → what its names begin with; empty: there are no such files
  HostArrays extra_tensors = {};                // further tensors, which say what the model is
};

struct FamilySpec {
  /// Components that denoise, from noisy to clean; usually one. The first names a run's weights.
  std::vector<std::string> denoisers;
  /// Of two: part of all times below which the second predicts, not the first.
  std::optional<double> boundary_ratio = {};
  std::shared_ptr<const Autoencoder> autoencoder = std::make_shared<const Autoencoder>();
  std::vector<TextEncoderSpec> text_encoders = {};
  std::vector<Field> conditioning = {};       // of one encoded caption: "prompt_embeds", f32 [L, D]
  std::vector<Field> size_conditioning = {};  // of the sizes of one sample: "time_ids", f32 [6]
  /// A field s32 [] of `conditioning`: how many rows of its fields [L, D] are tokens. The others are padding, and no
  /// prediction depends on them or on their number. Empty: all rows count.
  std::string text_lengths = {};
  bool zero_empty_prompt = false;  // without a negative prompt, guidance leads away from zeros, or else the empty text
  /// guidance_scale is an input of the denoiser, which was trained to predict what guidance gives.
  bool embedded_guidance = false;
  bool unguided_only = false;  // distilled to few steps without guidance: guidance_scale has no effect
  /// true_cfg_scale is the factor between two predictions, not guidance_scale.
  bool true_guidance = false;
  /// The prediction that is used, of a guided one and the one with the prompt alone, latents f32 [B, …]; empty: the
  /// first.
  std::function<Tensor(Tensor guided, Tensor positive)> after_guidance = {};
  /// The guidance_scale that means no guidance: 1, where predictions are negative + scale · (positive − negative),
  /// or 0, where they are positive + scale · (positive − negative).
  double unguided = 1;
  int64_t patch = 1, frame_patch = 1;  // sides and frames of latents are multiples of these
  int64_t training_patch = 0;          // sides of training images' latents are multiples of this; 0: patch
  bool even_flow_steps = false;        // SampleFacts::even_flow_steps of the published pipeline
  /// SampleFacts::log_shift for tokens of a sample and steps; empty: none.
  std::function<double(int64_t tokens, int64_t steps)> log_shift = {};
  int64_t default_frames = 1;  // of media where no key says how many
  /// For use_magcache: measured ratios, two for each step, with prompt and without; empty: none are known.
  std::function<std::vector<double>(const MediaSize&, bool images)> magcache_ratios = {};
  std::string axis_rules = {};  // logical_axis_rules of a run that gives none; empty: those of AxisRules::defaults()
  LoraSpec lora = {};
  SingleFile single_file = {};
  std::shared_ptr<const RecordFormat> records = moment_records();
  ReferenceConventions reference = {};

  const std::string& denoiser() const { return denoisers.front(); }
  bool videos() const { return autoencoder->frame_scale > 0; }
  /// Both sides of training images are multiples of this, in pixels.
  int64_t size_multiple() const { return autoencoder->downscale * std::max(patch, training_patch); }
  /// Components that captions go through, in order.
  std::vector<std::string> text_components() const;
  /// Fields of one tokenized caption; `rows`: with room for so many tokens behind template_tokens; 0: for max_tokens.
  std::vector<Field> text_fields(int64_t rows = 0) const;
  /// Those of the key prompt_2.
  std::vector<std::string> second_text_fields() const;
  std::vector<std::string> lora_targets(const std::string& component) const;
  /// Rows that fields [L, D] need for texts of `longest` tokens: the next of 64, 128, 256, …, at most L, so that few
  /// programs are compiled. L without text_lengths.
  int64_t text_rows(int64_t longest) const;
  /// Conditioning of N texts with its fields [N, L, D] cut to `rows`, or filled up with zeros.
  HostArrays with_text_rows(HostArrays fields, int64_t rows) const;
};

}  // namespace md
