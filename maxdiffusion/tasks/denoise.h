// Denoising objective: mean of w(t)·m·(target − prediction)², or of another distance (`Distance`). A batch holds media
// and captions, or encodings of them, or everything including the random numbers of a recorded run.
// m is 1, or with `masked` the mask at the latents' size, equal for all channels. The mean is over all elements, masked
// ones included, so that masks make the loss smaller, as in kohya's sd-scripts (apply_masked_loss). Sources: Ho et al.
// 2020 (DDPM); Rombach et al. 2022; Podell et al. 2023 (micro-conditioning); Ruiz et al. 2022 (DreamBooth); Stoica et
// al. 2025 (contrastive flow matching).
#pragma once

#include <memory>
#include <optional>

#include "maxdiffusion/base/key_path.h"
#include "maxdiffusion/base/key_values.h"
#include "maxdiffusion/tasks/inputs.h"

namespace md {

/// The distance of a prediction from its target, of their difference e and a threshold c that follows from the
/// timestep. l2: e²; l1: |e|; huber: 2c(√(e² + c²) − c); smooth_l1: 2(√(e² + c²) − c). Source: kohya's sd-scripts,
/// conditional_loss and get_huber_threshold_if_needed.
struct Distance {
  std::string type = "l2";
  double c = 0.1, scale = 1;
  std::string schedule = "snr";  // constant: c·scale; exponential: c^(t/T)·scale; snr: c + (1 − c)·signal_share²
  /// e: [B, …]; t: [B].
  Tensor of(Tensor e, Tensor t, const NoiseProcess& process) const;
};

/// Keys of the denoising objective, except those of the noise (schedulers/process.h).
struct DenoiseKeys {
  double noise_offset = 0, input_perturbation = 0, caption_dropout = 0, multires_noise_discount = 0.3;
  double huber_c = 0.1, huber_scale = 1, cfm_lambda = 0.05;
  int64_t multires_noise_iterations = 0;
  std::string loss_type = "l2", huber_schedule = "snr";
  bool train_text_encoder = false, cache_latents_text_encoder_outputs = true, masked_loss = false;
  bool contrastive_flow_matching = false;
  std::string replay_batches;
  template <class V>
  void visit(V&& v) {
    v("noise_offset", noise_offset, "deviation of one shift of the noise per image and channel; 0: off", at_least(0));
    v("input_perturbation", input_perturbation, "deviation of noise added to the noise, unknown to the target; 0: off",
      at_least(0));
    v("multires_noise_iterations", multires_noise_iterations,
      "add noise of this many smaller resolutions, enlarged, to the noise; 0: off", in_range(0, 20));
    v("multires_noise_discount", multires_noise_discount,
      "multires_noise_iterations: factor of each from the one before", in_range(0, 1));
    v("loss_type", loss_type, "distance of the prediction from its target; huber and smooth_l1 as huber_schedule says",
      one_of({"l2", "l1", "huber", "smooth_l1"}));
    v("huber_c", huber_c, "threshold of huber and smooth_l1, above which the loss grows with the error, not its square",
      in_range(above(0), 1));
    v("huber_schedule", huber_schedule,
      "threshold by timestep; constant: huber_c; exponential: from 1 down to huber_c; snr: from 1 at data to huber_c "
      "at "
      "noise, of models that predict noise or v",
      one_of({"constant", "exponential", "snr"}));
    v("huber_scale", huber_scale, "factor of the threshold with huber_schedule=constant and exponential",
      at_least(above(0)));
    v("contrastive_flow_matching", contrastive_flow_matching,
      "subtract cfm_lambda times the squared distance of the prediction from the target of the sample before it in the "
      "batch; flow matching and v prediction");
    v("cfm_lambda", cfm_lambda, "contrastive_flow_matching: weight of the distance that is subtracted",
      in_range(above(0), below(1)));
    v("caption_dropout", caption_dropout, "probability of training with the empty caption", in_range(0, below(1)));
    v("train_text_encoder", train_text_encoder, "train the text encoder as well (models with one)");
    v("cache_latents_text_encoder_outputs", cache_latents_text_encoder_outputs,
      "encode images and captions once; false: in every step");
    v("masked_loss", masked_loss, "weigh the loss by masks, of alpha_mask or conditioning_data_dir");
    v("replay_batches", replay_batches,
      "safetensors file whose step{i}.latents, .noise, .timesteps, .encoder_hidden_states, .text_embeds and .time_ids "
      "replace data and random numbers",
      KeyPath::input);
  }
};

struct DenoiseTask : Task {
  std::shared_ptr<const Family> family;
  std::shared_ptr<const NoiseProcess> process;
  std::shared_ptr<const MediaInput> media = moments_input();
  std::shared_ptr<const TextInput> text = embeddings_input();
  std::shared_ptr<const NoiseInput> noise = random_noise_input();
  int64_t batch_size = 1;
  MediaSize size;  // of the media, pixels
  /// The denoiser's size conditioning if batches have no sizes. Absent: `size`.
  std::optional<MediaSize> conditioning_size;
  double caption_dropout = 0;
  double guidance = 1;  // see FamilySpec::embedded_guidance
  bool masked = false;  // every batch has masks
  Distance distance = {};
  /// Factor of the squared distance from the target of the sample before it in the batch, which is subtracted from the
  /// loss of a sample (the first: of the last). Needs a process whose target is a velocity.
  double contrast = 0;
  bool sizes = false;       // every batch has FamilySpec::size_conditioning
  bool images = false;      // every batch has ImageConditioning::fields
  int64_t references = 0;   // number of reference images in every batch, each of the sample's size
  std::string expert = {};  // the trained one of FamilySpec::denoisers; empty: FamilySpec::denoiser
  std::string name = {};    // label(): distinguishes this task from others of its run
  /// DreamBooth: weight of the loss of a second batch, whose fields have the prefix class_. Absent: no second batch.
  std::optional<double> prior_loss_weight;

  std::string model() const override { return expert.empty() ? family->spec().denoiser() : expert; }
  std::string label() const override { return name; }
  double sampling_weight() const override { return process_of_size()->probability(); }
  /// `process` for samples of `size`.
  std::shared_ptr<const NoiseProcess> process_of_size() const;
  /// Whether the batch's timesteps, if it has any, are in the range of the process. Throws invalid_config if only some
  /// are.
  bool accepts(const NamedShards& batch) const override;
  /// Fields of `media`, `text` and `noise`; mask f32 [B, h, w, 1]; the family's size fields; with caption_dropout those
  /// of `text` for the empty caption, without batch axis and with the prefix empty_.
  std::vector<BatchField> batch() const override;
  Tensor loss(const Models& models, const Feed& feed, Rng rng) const override;
  Tensor batch_rows(Tensor replica, int64_t replicas) const override;
  std::optional<TimedLosses> timed_losses(const HostArrays& samples) const override;
  /// The loss before the mean over the batch: [B] f32, or [2B] with a class batch.
  Tensor sample_losses(const Models& models, const Feed& feed, Rng rng) const;
};

}  // namespace md
