// A family: how the models of one kind of model folder work together, as one record. What trains, samples, caches and
// evaluates knows only this page; what differs between families stands in one file each.
//
//   folder    ModelFolder     which models there are, and their configs
//   family    Family          how captions, media and noisy latents go through them
//
// Tensors have the batch (B) on axis 0; shapes of fields leave it out.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "maxdiffusion/data/batches/dataset.h"
#include "maxdiffusion/families/latent_scale.h"
#include "maxdiffusion/model_folder/model_folder.h"
#include "maxdiffusion/models/vae.h"
#include "maxdiffusion/nn/scope.h"

namespace md {

/// The root scope of a component: "unet", "text_encoder". Asked for once for each component that a function uses.
using Models = std::function<Scope(const std::string& component)>;
/// Inputs of the denoiser beside the noisy latents, by name: "prompt_embeds", "time_ids". Each [B, …].
using Conditioning = std::map<std::string, Tensor>;

/// A prediction, f32, of the latents' sizes, and what the denoiser's blocks added to their input, [B, …].
struct Denoised {
  Tensor sample, residual;
};

/// A named array of one sample.
struct Field {
  std::string name;
  Shape shape;
};

/// Height and width in pixels, and the number of frames; an image has one.
struct MediaSize {
  int64_t height = 0, width = 0, frames = 1;
};
/// What the layers of an autoencoder keep between the chunks of one video, each [B, …] with as many axes as the pixels;
/// nothing before the first chunk.
using MediaState = std::vector<Tensor>;
/// Sizes that some denoisers are conditioned on, in pixels: height and width of the image before cropping, top and left
/// of the crop, height and width wanted.
struct SizeHints {
  std::array<int64_t, 2> original, crop_top_left, target;
};

/// A file that holds several models in the original program's layout.
struct SingleFile {
  std::map<std::string, std::string> prefixes;  // component → what stands before its names; empty: no such files
  HostArrays more;                              // further tensors, which say what the model is
};

/// Immutable; thread safe.
class Family {
 public:
  virtual ~Family() = default;

  // --- Models -------------------------------------------------------------------------------------------------------
  /// The component that is trained and names a run's weights: "unet".
  virtual std::string denoiser() const = 0;
  /// Components that take turns at denoising, each in denoiser()'s place, from noisy to clean.
  virtual std::vector<std::string> denoisers() const { return {denoiser()}; }
  /// The time below which the second of two predicts, not the first; 0 where there is one. `boundary_ratio`: of all
  /// times, replaces the folder's own.
  virtual double boundary_time(std::optional<double> /*boundary_ratio*/ = {}) const { return 0; }
  /// The component that makes latents of media; empty: media are denoised as they are.
  virtual std::string autoencoder() const { return ""; }
  /// Components that captions go through, in order; may be none.
  virtual std::vector<std::string> text_encoders() const { return {}; }
  /// Ends of the names of the layers of a component that get LoRA matrices where no key names any.
  virtual std::vector<std::string> lora_targets(const std::string& component) const;
  /// Whether LoRA files for other programs have the original program's names (ComfyUI's layout), or else the published
  /// ones (kohya's).
  virtual bool original_lora_names() const { return false; }
  /// What kohya's programs call the model in the metadata of LoRA files: "sd_v1". Empty: they do not know it.
  virtual std::string kohya_version() const { return ""; }
  /// The table logical_axis_rules of a run that gives none; empty: that of AxisRules::defaults().
  virtual std::string axis_rules() const { return ""; }

  /// How a file in the original program's layout holds these models.
  virtual SingleFile single_file() const { return {}; }

  // --- Captions -----------------------------------------------------------------------------------------------------
  /// Fields of one tokenized caption: "ids", s32 [L].
  virtual std::vector<Field> text_fields() const = 0;
  /// Those of text_fields that are of another text (the key prompt_2) where one is given: a second text encoder's.
  virtual std::vector<std::string> second_text_fields() const { return {}; }
  /// Captions as text_fields, one row each. Logs how many were longer than the text encoders read, and so are cut.
  virtual HostArrays tokenize(const std::vector<std::string>& captions) const = 0;
  /// Fields of one encoded caption: "prompt_embeds", f32 [L, D].
  virtual std::vector<Field> conditioning_fields() const = 0;
  /// text_fields of B captions → their conditioning_fields. `clip_skip`: how many of the text encoders' last layers are
  /// left out. Throws invalid_config where they have too few.
  virtual Conditioning encode_text(const Models& models, const Conditioning& text, int64_t clip_skip = 0) const = 0;
  /// What guidance steers away from where no negative prompt is given: zeros (true) or the empty text.
  virtual bool zeros_for_empty_prompt() const { return false; }

  // --- Media --------------------------------------------------------------------------------------------------------
  /// Sizes of the latents of one sample of this size. Throws invalid_config for a size that the models cannot take.
  virtual Dims latent_dims(const MediaSize& size) const = 0;
  /// The size of media whose latents have these sizes.
  virtual MediaSize media_size(const Dims& latent) const;
  /// Pixels on the side of one latent cell.
  virtual int64_t downscale() const { return 1; }
  /// 0: media are images, without an axis of frames. Above: they are videos, whose latents have one frame for the first
  /// and one for each `frame_scale` further frames.
  virtual int64_t frame_scale() const { return 0; }
  /// Of the pixels of one sample: [H, W, 3], or [F, H, W, 3].
  Dims pixel_dims(const MediaSize& size) const;
  /// Frames of videos where no key says how many.
  virtual int64_t default_frames() const { return 1; }
  /// Both sides of training images are multiples of this, because the autoencoder and the denoiser halve them.
  virtual int64_t size_multiple() const { return downscale(); }
  /// Side of the largest latents, in cells, that the decoder was made for; 0: any size. See encoders/tiles.h.
  virtual int64_t decoder_tile() const { return 0; }
  /// pixels: [B] + pixel_dims in [−1, 1] → mean and log-variance of their latents, unscaled. Without a log-variance the
  /// latents are the mean.
  virtual Posterior encode_media(const Models& models, Tensor pixels) const;
  /// Latents, unscaled → [B] + pixel_dims, f32.
  virtual Tensor decode_media(const Models& models, Tensor latents) const;
  /// Videos: encode_media of the next frames of one that is given in chunks, which together give what the whole gives.
  /// `state` holds what the chunk before left, and gets what this one leaves, of the same shapes. The first chunk has
  /// one frame or more, as a whole video; later ones have n·frame_scale(), and n latent frames.
  virtual Posterior encode_chunk(const Models& models, Tensor pixels, MediaState& state) const;
  /// The same of decode_media: the first chunk has one latent frame or more.
  virtual Tensor decode_chunk(const Models& models, Tensor latents, MediaState& state) const;
  /// How latents are scaled for the denoiser.
  virtual LatentScale latent_scale() const { return {}; }
  /// For an autoencoder just trained: its config.json with the scale measured on these moments, unscaled.
  virtual nlohmann::json fitted_autoencoder(nlohmann::json config, const EachMoments& moments) const;

  // --- Images that media begin or end with --------------------------------------------------------------------------
  /// How many the denoiser sees beside the text: none, the first frame, or the first and the last. `least`, `most`.
  struct ImageCount {
    int64_t least = 0, most = 0;
  };
  virtual ImageCount images() const { return {}; }
  /// Conditioning fields that they become, of one sample of media of this size.
  virtual std::vector<Field> image_fields(const MediaSize&) const { return {}; }
  /// The component that looks at them, beside the autoencoder; empty: there is none.
  virtual std::string image_encoder() const { return ""; }
  /// u8 [H, W, 3] each → f32 [N, …], as the image encoder takes them.
  virtual HostArray prepare_images(const std::vector<HostArray>&) const { return {}; }
  /// Such images → some of image_fields, [1, …].
  virtual Conditioning encode_images(const Models&, Tensor /*prepared*/) const { return {}; }
  /// u8 [H, W, 3] of `size` each → f32 pixels [1, F, H, W, 3] in [−1, 1], of which the autoencoder makes moments.
  virtual HostArray image_pixels(const std::vector<HostArray>&, const MediaSize&) const { return {}; }
  /// Such moments, unscaled → the other image_fields, [1, …].
  virtual HostArrays image_conditioning(const HostArray& /*moments*/, int64_t /*images*/, const MediaSize&) const {
    return {};
  }
  /// Scaled latents [N, …] just sampled with this conditioning, where the images belong into them as they are.
  virtual HostArray with_images(HostArray latents, const HostArrays& /*conditioning*/) const { return latents; }

  // --- Denoising ----------------------------------------------------------------------------------------------------
  /// The denoiser's prediction for noisy, scaled latents x at times t [B]; f32, of x's sizes.
  virtual Tensor denoise(const Models& models, Tensor x, Tensor t, const Conditioning& conditioning) const = 0;
  /// denoise() that also gives the residual; given one of an earlier step, adds that and runs no block. Throws
  /// invalid_config where the denoiser's blocks do not follow each other.
  virtual Denoised denoise_keeping(const Models& models, Tensor x, Tensor t, const Conditioning& conditioning,
                                   Tensor residual) const;
  /// For use_magcache: measured ratios, two for each step, with prompt and without; empty: none are known. `images`:
  /// the media begins with any.
  virtual std::vector<double> magcache_ratios(const MediaSize& /*size*/, bool /*images*/) const { return {}; }
  /// What every step makes of the conditioning alone, [layers, B, …] each: it may be made once, and added to what
  /// denoise() is given. Empty: there is nothing.
  virtual Conditioning shared_context(const Models&, const Conditioning&) const { return {}; }
  /// Whether guidance_scale is no factor between two predictions, because the denoiser was trained to give what
  /// guidance gives. Then true_cfg_scale is that factor.
  virtual bool distilled_guidance() const { return false; }
  /// How such a denoiser is told the scale, of `batch` samples; empty: it is not told.
  virtual Conditioning guidance_conditioning(Graph&, int64_t /*batch*/, double /*scale*/) const { return {}; }
  /// Fields that hold the sizes of one sample ("time_ids", f32 [6]); empty where the denoiser is not conditioned on
  /// them.
  virtual std::vector<Field> size_fields() const { return {}; }
  /// size_fields of `batch` samples that all have these sizes.
  virtual Conditioning size_conditioning(Graph&, int64_t /*batch*/, const SizeHints&) const { return {}; }

  /// `config`, of scheduler_config.json after the keys, for drawing media of this size: how the levels of noise lie
  /// where that depends on the size.
  virtual nlohmann::json sampler_config(nlohmann::json config, const MediaSize&) const;

  // --- Conventions --------------------------------------------------------------------------------------------------
  /// Values of the keys model_name and model_type that say what this folder is, as users of the reference write them.
  virtual std::vector<std::string> model_names() const { return {}; }
  virtual std::vector<std::string> model_types() const { return {}; }
  /// Names of the files that generate writes begin with this, drawn with this seed.
  virtual std::string file_prefix(uint64_t /*seed*/) const { return "image_"; }
  /// TFLOP of a training step on `samples` media of this size as MaxDiffusion counts them, for comparisons; 0: it does
  /// not, or as here.
  virtual double reference_tflops(const MediaSize&, double /*samples*/) const { return 0; }
  /// Whether gradients are clipped to max_grad_norm also where opt_enable_grad_global_norm_clipping is off.
  virtual bool always_clips_by_norm() const { return false; }
  /// Warns where a run's key repeats a member of config.json with another value.
  virtual void check_repeated_keys(int64_t /*norm_num_groups*/) const {}

  // --- Data that another program encoded ----------------------------------------------------------------------------
  /// Names of the arrays of a record that holds one encoded sample, with alternatives: "moments|latents".
  virtual std::vector<std::string> encoded_columns() const;
  /// Such records, stacked on axis 0 → fields of a training batch: "moments" or "latents", scaled, and the
  /// conditioning.
  virtual HostArrays from_encoded(const HostArrays& records) const;
  /// One sample → such a record. moments: [h, w, 2C] (mean, standard deviation), unscaled; text, conditioning: the
  /// caption's text_fields and conditioning_fields; `noise(n)` gives n standard normal numbers.
  virtual HostArrays to_encoded(const HostArray& moments, const HostArrays& text, const HostArrays& conditioning,
                                const std::function<std::vector<float>(size_t n)>& noise) const;
};

/// A pipeline class of model_index.json, and what makes the family of its folders.
struct FamilyClass {
  std::string pipeline;  // "StableDiffusionPipeline"
  std::function<std::shared_ptr<const Family>(const ModelFolder&)> make;
  std::vector<std::string> commands = {};    // names behind train_ and generate_ that users of the reference type
  std::vector<std::string> converters = {};  // names of its programs that are prepare_tfrecords here
};
/// For families of other programs; those of this library are always there. Not thread safe: call it before a folder is
/// opened.
void add_family(FamilyClass family);
/// All FamilyClass::commands: "sdxl", …
std::vector<std::string> family_commands();
/// All FamilyClass::converters.
std::vector<std::string> family_converters();
/// The family of a folder, by its pipeline class. Throws invalid_config for a class without a family (listing those
/// that have one), and where the folder lacks a model that the family needs.
std::shared_ptr<const Family> make_family(const ModelFolder& folder);

}  // namespace md
