// A family: how the models of one kind of model folder work together. What trains, samples, caches and evaluates knows
// only this page; what differs between families is in one file each.
//
//   folder    ModelFolder     which models there are, and their configs
//   spec      FamilySpec      the facts: components, fields, conventions (family_spec.h)
//   family    Family          how captions and noisy latents go through the models
//
// Tensors have the batch (B) on axis 0; shapes of fields leave it out.
#pragma once

#include <array>
#include <utility>

#include "maxdiffusion/families/family_spec.h"
#include "maxdiffusion/model_folder/model_folder.h"

namespace md {

/// Inputs of the denoiser in addition to the noisy latents, by name: "prompt_embeds", "time_ids". Each [B, …].
using Conditioning = std::map<std::string, Tensor>;

/// f32, of the latents' sizes; and what the denoiser's blocks added to their input, [B, …], where they follow each
/// other.
struct Prediction {
  Tensor sample, residual;
};
struct PredictOptions {
  Tensor residual = {};  // of an earlier step: it is added, and no block runs. Only for families that predict one
};

/// Sizes that some denoisers are conditioned on, in pixels: height and width of the image before cropping, top and left
/// of the crop, height and width wanted.
struct SizeHints {
  std::array<int64_t, 2> original, crop_top_left, target;
};
/// What is the same for all samples.
struct SampleSettings {
  SizeHints sizes;
  double embedded_guidance = 1;  // see FamilySpec::embedded_guidance
};

/// Images that media begin or end with. Constant once made; thread safe.
class ImageConditioning {
 public:
  virtual ~ImageConditioning() = default;

  int64_t min_images = 0, max_images = 1;  // how many: none, the first frame, or the first and the last
  std::string encoder;  // the component that encodes them, in addition to the autoencoder; empty: none

  /// Conditioning fields that they become, of one sample of media of this size.
  virtual std::vector<Field> fields(const MediaSize& size) const = 0;
  /// u8 [H, W, 3] each → f32 [N, …], as the image encoder takes them.
  virtual HostArray prepare(const std::vector<HostArray>&) const { return {}; }
  /// Such images → some of the fields, [1, …].
  virtual Conditioning encode(const Models&, Tensor /*prepared*/) const { return {}; }
  /// u8 [H, W, 3] of `size` each → f32 pixels [1, F, H, W, 3] in [−1, 1], of which the autoencoder makes moments.
  virtual HostArray pixels(const std::vector<HostArray>& images, const MediaSize& size) const = 0;
  /// Such moments, unscaled → the other fields, [1, …].
  virtual HostArrays from_moments(const HostArray& moments, int64_t images) const = 0;
  /// Scaled latents [N, …] just sampled with this conditioning, where the images belong into them as they are.
  virtual HostArray restored(HostArray latents, const HostArrays& /*conditioning*/) const { return latents; }
};

/// Images that samples are made from, each of its own size, which stay as they are while the denoiser attends to them:
/// for editing, and for what is to look the same. Constant once made; thread safe.
class ReferenceImages {
 public:
  virtual ~ReferenceImages() = default;

  int64_t max_images = 10;

  /// What of an image is encoded: it is scaled (Lanczos), and the middle of that is kept.
  struct Fitted {
    MediaSize scaled, kept;
  };
  /// Throws invalid_config for a size that the models do not take.
  virtual Fitted fitted(const MediaSize& own) const = 0;
  /// Height and width of samples where no key gives them: those that are kept of the first image.
  virtual MediaSize sample_size(const std::vector<MediaSize>& own) const { return fitted(own.at(0)).kept; }

  /// The conditioning field of image i, from 0: scaled latents, the mode of the posterior, f32 [h, w, C].
  static std::string field(size_t i);
  /// Those that are there, in order, each [B, h, w, C].
  static std::vector<Tensor> of(const Conditioning& conditioning);
};

/// Immutable; thread safe.
class Family {
 public:
  virtual ~Family() = default;

  const FamilySpec& spec() const { return spec_; }

  /// text_fields of B captions → FamilySpec::conditioning. `clip_skip`: how many of the text encoders' last layers are
  /// left out. Throws invalid_config where they have too few.
  virtual Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip) const = 0;
  /// The denoiser's prediction for noisy, scaled latents x at times t [B]; `models` gives the one that predicts as
  /// FamilySpec::denoiser.
  virtual Prediction predict(const Models& models, Tensor x, Tensor t, const Conditioning& conditioning,
                             const PredictOptions& options) const = 0;
  /// Fields of `batch` samples that follow from settings: size_conditioning, and how embedded guidance is given.
  virtual Conditioning extra_conditioning(Graph&, int64_t /*batch*/, const SampleSettings&) const { return {}; }
  /// What every step computes from the conditioning alone, [layers, B, …] each: computed once, it can be added to the
  /// conditioning. Empty: there is nothing.
  virtual Conditioning prompt_cache(const Models&, const Conditioning&) const { return {}; }
  /// Null: media begin with noise alone.
  virtual const ImageConditioning* image_conditioning() const { return nullptr; }
  /// Null: no reference images.
  virtual const ReferenceImages* reference_images() const { return nullptr; }
  /// Throws invalid_config for media that the models cannot take, beyond what latent_dims asks.
  virtual void check_size(const MediaSize&) const {}

  /// Captions as text_fields, one row each. Logs how many were longer than the text encoders read, and so are cut.
  HostArrays tokenize(const std::vector<std::string>& captions) const;
  /// Sizes of the latents of one sample of this size. Throws invalid_config for a size that the models cannot take.
  Dims latent_dims(const MediaSize& size) const;

  /// How many images media must begin with.
  int64_t required_images() const { return image_conditioning() ? image_conditioning()->min_images : 0; }
  /// Conditioning fields of reference images of these sizes.
  std::vector<Field> reference_fields(const std::vector<MediaSize>& own) const;

 protected:
  explicit Family(FamilySpec spec) : spec_(std::move(spec)) {}

 private:
  FamilySpec spec_;
};

/// Pipeline classes of model_index.json, and what makes the family of their folders.
struct FamilyClass {
  std::vector<std::string> pipelines;  // "StableDiffusionPipeline"
  std::function<std::shared_ptr<const Family>(const ModelFolder&)> make;
};
/// For families of other programs; those of this library are always there. Not thread safe: call it before a folder is
/// opened.
void add_family(FamilyClass family);
/// All of their pipeline classes.
std::vector<std::string> family_pipelines();
/// The family of a folder, by its pipeline class. Throws invalid_config for a class without a family (listing those
/// that have one), and where the folder lacks a model that the family needs.
std::shared_ptr<const Family> make_family(const ModelFolder& folder);

}  // namespace md
