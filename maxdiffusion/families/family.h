// A family: how the models of one kind of model folder work together, as one record. What trains, samples, caches and
// evaluates knows only this page; what differs between families stands in one file each.
//
//   folder    ModelFolder     which models there are, and their configs
//   family    Family          how captions, media and noisy latents go through them
//
// Tensors of a batch have it on axis 0; shapes of fields are given without it.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/families/latent_scale.h"
#include "maxdiffusion/families/model_folder.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// The root scope of a component: "unet", "text_encoder". Asked for once each.
using Models = std::function<Scope(const std::string& component)>;
/// What the denoiser sees beside the noisy latents, by name: "prompt_embeds", "time_ids". Each [B, …].
using Conditioning = std::map<std::string, Tensor>;

/// A named array of one sample.
struct Field {
  std::string name;
  Shape shape;
};

/// Pixels, and frames of a video; a picture has one.
struct MediaSize {
  int64_t height = 0, width = 0, frames = 1;
};
/// What is said of a sample's size: height and width before cropping, top and left of the crop, height and width that
/// are wanted; in pixels.
struct SizeHints {
  std::array<int64_t, 2> original, crop_top_left, target;
};

/// Immutable; thread safe.
class Family {
 public:
  virtual ~Family() = default;

  // --- Models -------------------------------------------------------------------------------------------------------
  /// The component that is trained and names a run's weights: "unet".
  virtual std::string denoiser() const = 0;
  /// The component that makes latents of media; empty: media are denoised as they are.
  virtual std::string autoencoder() const { return ""; }
  /// Components that captions go through, in order; may be none.
  virtual std::vector<std::string> text_encoders() const { return {}; }
  /// The table logical_axis_rules of a run that gives none; empty: that of AxisRules::defaults().
  virtual std::string axis_rules() const { return ""; }

  // --- Captions -----------------------------------------------------------------------------------------------------
  /// Fields of one tokenized caption ("ids", s32 [L]), and captions as such arrays, a row each. One warning counts
  /// captions that are cut.
  virtual std::vector<Field> text_fields() const = 0;
  virtual HostArrays tokenize(const std::vector<std::string>& captions) const = 0;
  /// Fields of one encoded caption ("prompt_embeds", f32 [L, D]), and tokenized captions as such tensors.
  /// `clip_skip`: layers left out at the end. Throws invalid_config where there are not so many.
  virtual std::vector<Field> conditioning_fields() const = 0;
  virtual Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip = 0) const = 0;
  /// Whether the unconditional half of guidance is zeros, and not the empty text, where no negative prompt is given.
  virtual bool zeros_for_empty_prompt() const { return false; }

  // --- Media --------------------------------------------------------------------------------------------------------
  /// Latents of media of this size, without the batch. Throws invalid_config naming the size that does not fit.
  virtual Dims latent_dims(const MediaSize& size) const = 0;
  /// The size of media that have these latents.
  virtual MediaSize media_size(const Dims& latent) const { return {latent[0] * downscale(), latent[1] * downscale()}; }
  /// Pixels of a latent cell's side.
  virtual int64_t downscale() const { return 1; }
  /// Both sides of training pictures are multiples of this: the autoencoder and the denoiser halve them.
  virtual int64_t size_multiple() const { return downscale(); }
  /// Sides of the largest tile, in latent cells, that the decoder was made for; 0: any.
  virtual int64_t decoder_tile() const { return 0; }
  /// pixels: [B, H, W, 3] in [−1, 1] → mean and log-variance of latents, unscaled; without a logvar: exactly the mean.
  virtual Posterior encode_media(const Models& models, Tensor pixels) const;
  /// Latents, unscaled → [B, H, W, 3] f32.
  virtual Tensor decode_media(const Models& models, Tensor latents) const;
  /// How latents are scaled for the denoiser.
  virtual LatentScale latent_scale() const { return {}; }
  /// The autoencoder's config with the scale that these moments ([N, …, 2C], unscaled) ask for: of one just trained.
  virtual nlohmann::json fitted_autoencoder(nlohmann::json config, const HostArray& moments) const;

  // --- Denoising ----------------------------------------------------------------------------------------------------
  /// What the denoiser says of scaled latents x at time t [B].
  virtual Tensor denoise(const Models& models, Tensor x, Tensor t, const Conditioning& conditioning) const = 0;
  /// Fields that say the size of each sample ("time_ids", f32 [6]); empty where the denoiser sees none.
  virtual std::vector<Field> size_fields() const { return {}; }
  virtual Conditioning size_conditioning(Graph&, int64_t /*batch*/, const SizeHints&) const { return {}; }

  // --- Conventions --------------------------------------------------------------------------------------------------
  /// Names of drawn files begin so.
  virtual std::string file_prefix() const { return "image_"; }
  /// Whether max_grad_norm counts without opt_enable_grad_global_norm_clipping.
  virtual bool always_clips_by_norm() const { return false; }
  /// Members of config.json that a run's keys repeat; warns where a key says otherwise.
  virtual void check_repeated_keys(int64_t /*norm_num_groups*/) const {}

  // --- Data that another program encoded ----------------------------------------------------------------------------
  /// Features of a TFRecord or ArrayRecord that holds one sample encoded, with alternatives: "moments|latents".
  virtual std::vector<std::string> encoded_columns() const;
  /// Such records, stacked, as fields of a training batch: "moments" or "latents" (scaled), and the conditioning.
  virtual HostArrays from_encoded(const HostArrays& records) const;
  /// One such record. moments: [h, w, 2C] (mean, deviation), unscaled; text, conditioning: rows of one caption;
  /// `noise(n)`: n standard normal draws.
  virtual HostArrays to_encoded(const HostArray& moments, const HostArrays& text, const HostArrays& conditioning,
                                const std::function<std::vector<float>(size_t n)>& noise) const;
};

/// A pipeline class of model_index.json and the family of its folders.
struct FamilyClass {
  std::string pipeline;  // "StableDiffusionPipeline"
  std::function<std::shared_ptr<const Family>(const ModelFolder&)> make;
  std::vector<std::string> commands = {};  // names behind train_ and generate_ that users of the reference type
};
/// For families of other programs; those of this library are always there. Not thread safe: call it before a folder is
/// opened.
void add_family(FamilyClass family);
/// All FamilyClass::commands: "sdxl", …
std::vector<std::string> family_commands();
/// The family of a folder. Throws invalid_config, listing those known, for a pipeline class without one, and where the
/// folder lacks what the family needs.
std::shared_ptr<const Family> make_family(const ModelFolder& folder);

}  // namespace md
