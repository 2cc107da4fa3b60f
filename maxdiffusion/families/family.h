// A family: how the models of one kind of model folder work together. Training, sampling, caching and evaluation use
// only this interface; each family implements it in one file.
//
//   folder    ModelFolder     the models of the folder and their configs
//   spec      FamilySpec      the facts: components, fields, conventions (family_spec.h)
//   family    Family          encodes captions and predicts with the denoiser
//
// Tensors have the batch (B) on axis 0; shapes of fields leave it out.
#pragma once

#include <array>
#include <utility>

#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/models/step_reuse.h"

namespace md {

/// Inputs of the denoiser in addition to the noisy latents, by name: "prompt_embeds", "time_ids". Each [B, …].
using Conditioning = std::map<std::string, Tensor>;

struct PredictOptions {
  /// Null: nothing is reused. Of FamilySpec::blocks or, if up_layers is not 0, of deep_levels.
  StepReuse* reuse = {};
  /// UNetInputs::freeu, for families whose spec has_freeu.
  std::optional<std::array<double, 4>> freeu = {};
};

/// Sizes in pixels that some denoisers are conditioned on: height and width of the image before cropping, top and left
/// of the crop, and height and width of the target.
struct SizeHints {
  std::array<int64_t, 2> original, crop_top_left, target;
};
/// Settings that all samples share.
struct SampleSettings {
  SizeHints sizes;
  Tensor embedded_guidance;  // f32 [], see FamilySpec::embedded_guidance
  /// For models that read them: of the rows with the prompt, and of the first `negative_rows`.
  double aesthetic_score = 6, negative_aesthetic_score = 2.5;
  int64_t negative_rows = 0;
};

/// Images that media begin or end with. Immutable; thread safe.
class ImageConditioning {
 public:
  virtual ~ImageConditioning() = default;

  int64_t min_images = 0, max_images = 1;  // number of images: none, the first frame, or the first and the last
  std::string encoder;  // the component that encodes them, in addition to the autoencoder; empty: none

  /// Conditioning fields computed from the images, for one sample of media of this size.
  virtual std::vector<Field> fields(const MediaSize& size) const = 0;
  /// Images u8 [H, W, 3] → f32 [N, …], the image encoder's input.
  virtual HostArray prepare(const std::vector<HostArray>&) const { return {}; }
  /// Prepared images → those fields that the image encoder computes, [1, …].
  virtual Conditioning encode(const Models&, Tensor /*prepared*/) const { return {}; }
  /// Images u8 [H, W, 3] of `size` → f32 pixels [1, F, H, W, 3] in [−1, 1], the autoencoder's input.
  virtual HostArray pixels(const std::vector<HostArray>& images, const MediaSize& size) const = 0;
  /// The autoencoder's moments of these pixels, unscaled → the other fields, [1, …].
  virtual HostArrays from_moments(const HostArray& moments, int64_t images) const = 0;
  /// Scaled latents [N, …] sampled with this conditioning, with the images' own latents put back in families that need
  /// it.
  virtual HostArray restored(HostArray latents, const HostArrays& /*conditioning*/) const { return latents; }
};

/// Images that condition samples, each of its own size; the denoiser attends to their noise-free latents. For editing
/// and for a consistent subject. Immutable; thread safe.
class ReferenceImages {
 public:
  virtual ~ReferenceImages() = default;

  int64_t min_images = 0, max_images = 10;

  /// Sizes in preparing an image for the autoencoder: scaled (Lanczos), then cropped at the center.
  struct Fitted {
    MediaSize scaled, cropped;
  };
  /// Throws invalid_config for a size that the models do not support.
  virtual Fitted fitted(const MediaSize& size) const = 0;
  /// Height and width of samples if no key sets them: those of the first image after cropping.
  virtual MediaSize sample_size(const std::vector<MediaSize>& sizes) const { return fitted(sizes.at(0)).cropped; }

  /// The text encoder's view of images: tokens of a text after FamilySpec's template and before the caption.
  struct Seen {
    std::string text;              // input of the tokenizer
    int64_t tokens = 0;            // of that text
    std::vector<MediaSize> sizes;  // of `pixels` of each image
  };
  /// For images of these sizes. Empty: the text encoder does not see them.
  virtual Seen seen(const std::vector<MediaSize>& /*sizes*/) const { return {}; }
  /// u8 [H, W, 3] → f32 [h, w, C], the input of the text encoder's image encoder.
  virtual HostArray pixels(const HostArray& image) const { return image; }
  /// What that makes of `pixels` [B, h, w, C]: the text encoder's input, f32 [B, …].
  virtual Tensor features(const Models&, Tensor pixels) const { return pixels; }

  /// Name of the conditioning field of image i, from 0: scaled latents, the mode of the posterior, f32 [h, w, C].
  static std::string field(size_t i);
  /// The image fields present in `conditioning`, in order, each [B, h, w, C].
  static std::vector<Tensor> fields_in(const Conditioning& conditioning);
  /// Name of the text encoders' additional input for image i: its `features`.
  static std::string seen_field(size_t i);
  static std::vector<Tensor> seen_of(const Conditioning& text);
  /// Sizes of images u8 [H, W, 3].
  static std::vector<MediaSize> sizes_of(const std::vector<HostArray>& images);
};

/// A model next to the denoiser that conditions samples on an image (IP-Adapter, T2I-Adapter). Immutable; thread safe.
class ImageAdapter {
 public:
  virtual ~ImageAdapter() = default;

  std::string name;                     // its component, and the key that names its file or folder: "ip_adapter"
  std::vector<std::string> components;  // those that encode the image
  std::string scale;                    // the conditioning field f32 [1] of the factor of what it adds
  bool needs_image = true;              // false: without an image it does not act

  /// u8 [H, W, 3] → f32 [1, …], the input of encode. Throws invalid_config for sizes of samples that it does not
  /// support.
  virtual HostArray prepare(const HostArray& image, const MediaSize& size) const = 0;
  /// Conditioning fields of an image, [1, …], and those that differ in guidance's samples without conditioning.
  struct Fields {
    Conditioning image, without;
  };
  virtual Fields encode(const Models& models, Tensor prepared) const = 0;
};

/// The models of one kind of model folder as functions. Immutable; thread safe.
class Family {
 public:
  virtual ~Family() = default;

  const FamilySpec& spec() const { return spec_; }

  /// Encodes text_fields of B captions, and seen_field inputs of their reference images, to FamilySpec::conditioning.
  /// `clip_skip`: number of the text encoders' last layers to skip, 0 to FamilySpec::most_clip_skip.
  virtual Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const = 0;
  /// The denoiser's prediction, f32 of x's sizes, for noisy, scaled latents x at times t [B]. FamilySpec::denoiser
  /// names it in `models`, also if another expert predicts.
  virtual Tensor predict(const Models& models, Tensor x, Tensor t, const Conditioning& conditioning,
                         const PredictOptions& options) const = 0;
  /// Fields of `batch` samples that follow from settings: size_conditioning, and the input for embedded guidance.
  virtual Conditioning extra_conditioning(Graph&, int64_t /*batch*/, const SampleSettings&) const { return {}; }
  /// Values that every step computes from the conditioning alone, [layers, B, …] each. Computed once and added to the
  /// conditioning, they save that work. Empty: none.
  virtual Conditioning prompt_cache(const Models&, const Conditioning&) const { return {}; }
  /// Null if samples cannot begin with images.
  virtual const ImageConditioning* image_conditioning() const { return nullptr; }
  /// Null if the family has no reference images.
  virtual const ReferenceImages* reference_images() const { return nullptr; }
  /// Throws invalid_config for media sizes that the models do not support, in addition to the checks of latent_dims.
  virtual void check_size(const MediaSize&) const {}

  /// Captions as text_fields, one row each. If text encoders see reference images of these sizes, fields have
  /// FamilySpec::rows_of_images more rows. Logs the number of captions that are truncated to the text encoders' length.
  HostArrays tokenize(const std::vector<std::string>& captions, const std::vector<MediaSize>& references = {}) const;
  /// Sizes of the latents of one sample. Throws invalid_config for a media size that the models do not support.
  Dims latent_dims(const MediaSize& size) const;
  /// Tokens of a sample in the denoiser.
  int64_t tokens(const MediaSize& size) const;

  /// Number of images that media must begin with.
  int64_t required_images() const { return image_conditioning() ? image_conditioning()->min_images : 0; }
  /// Whether every sample changes an image: at least one reference image is needed.
  bool edits() const { return reference_images() && reference_images()->min_images > 0; }
  /// ReferenceImages::seen; empty without reference images.
  ReferenceImages::Seen seen(const std::vector<MediaSize>& references) const;
  /// FamilySpec::conditioning of captions with reference images of these sizes; longer if the text encoder sees them.
  std::vector<Field> caption_fields(const std::vector<MediaSize>& references) const;
  /// Conditioning fields of reference images of these sizes.
  std::vector<Field> reference_fields(const std::vector<MediaSize>& sizes) const;

 protected:
  explicit Family(FamilySpec spec) : spec_(std::move(spec)) {}

 private:
  FamilySpec spec_;
};

/// The pipeline classes of model_index.json that a family supports, and its factory.
struct FamilyClass {
  std::vector<std::string> pipelines;  // "StableDiffusionPipeline"
  std::function<std::shared_ptr<const Family>(const ModelFolder&)> make;
};
/// Adds a family of another program; this library's families are always known. Not thread safe: call it before any
/// folder is opened.
void add_family(FamilyClass family);
/// All supported pipeline classes.
std::vector<std::string> family_pipelines();
/// The family of a folder, by its pipeline class. Throws invalid_config for an unsupported class (listing the supported
/// ones), and if the folder lacks a model that the family needs.
std::shared_ptr<const Family> make_family(const ModelFolder& folder);

}  // namespace md
