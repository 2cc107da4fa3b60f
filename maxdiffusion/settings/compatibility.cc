#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/schedulers/scheduler.h"
#include "maxdiffusion/settings/data_mode.h"
#include "maxdiffusion/settings/key_rules.h"

namespace md {
namespace {

/// An option that is not a key, or that only some values of a key turn on, with its name in messages. Other options are
/// keys that differ from their defaults, or key=value.
struct Option {
  std::string_view name;
  bool (*used)(const RunConfig&);
};
constexpr Option kOptions[] = {
    {"DreamBooth (instance_data_dir)", [](const RunConfig& c) { return !c.dreambooth.instance_data_dir.empty(); }},
    {"encoded records (dataset_type tfrecord or grain with cache_latents_text_encoder_outputs)",
     [](const RunConfig& c) { return reads_encoded_records(c); }},
    {"train_new_unet", [](const RunConfig& c) { return new_denoiser(c.model); }},
    {"unet_checkpoint (or another key that names the denoiser's weights)",
     [](const RunConfig& c) { return c.model.names_denoiser_weights(); }},
    {"lora_files or lora_config", [](const RunConfig& c) { return !chosen_loras(c.lora).empty(); }},
    {"cache_latents_text_encoder_outputs",
     [](const RunConfig& c) {
       return c.denoise.cache_latents_text_encoder_outputs && c.dreambooth.instance_data_dir.empty();
     }},
    {"timestep_bias",
     [](const RunConfig& c) { return TimestepBias::from_map(c.process.timestep_bias).strategy != "none"; }},
    {"snr_gamma", [](const RunConfig& c) { return c.process.snr_gamma > 0; }},
    {"max_train_samples", [](const RunConfig& c) { return c.source.max_train_samples >= 0; }},
    {"eval_every", [](const RunConfig& c) { return c.eval.eval_every > 0; }},
};

const Option* option(std::string_view name) {
  const auto* found = std::ranges::find_if(
      kOptions, [&](const Option& o) { return o.name == name || o.name.starts_with(std::string(name) + " "); });
  return found == std::end(kOptions) ? nullptr : found;
}

std::string_view shown_name(std::string_view name) {
  if (const Option* o = option(name)) return o->name;
  return name;
}

/// The options of a run.
class Options {
 public:
  explicit Options(const RunConfig& c) : config_(c), keys_(c) {}
  bool use(std::string_view name) const {
    if (const Option* o = option(name)) return o->used(config_);
    const size_t value = name.find('=');
    const std::string key(name.substr(0, value));
    return value == name.npos ? keys_.changed(key) : keys_.value(key) == name.substr(value + 1);
  }

 private:
  const RunConfig& config_;
  KeyChanges keys_;
};

struct Rule {
  std::string_view option;
  std::vector<std::string_view> others;
  const char* reason;
};

const std::vector<std::string_view> kImageOptions = {
    "enable_bucket",         "frame_buckets",  "masked_loss",    "alpha_mask", "original_size_conditioning",
    "conditioning_data_dir", "dataset_config", "unmasked_weight"};

const std::vector<Rule>& exclusive() {
  static const std::vector<Rule> rules = {
      {"optimizer=schedule_free_adamw",
       {"lr_scheduler=linear", "lr_scheduler=cosine", "lr_scheduler=cosine_with_restarts", "lr_scheduler=polynomial",
        "lr_scheduler=rex", "lr_scheduler=warmup_stable_decay"},
       "its average takes the place of a descent"},
      {"optimizer=schedule_free_adamw", {"ema_decay"}, "its weights are an average"},
      {"DreamBooth", {"replay_batches", "train_new_vae", "caption_dropout", "snr_gamma"}, "it has two losses a step"},
      {"DreamBooth", {"max_train_samples", "random_flip", "random_crop"}, "every image of both folders is used whole"},
      {"DreamBooth", kImageOptions, "its images are squares of one size"},
      {"replay_batches",
       {"caption_dropout", "noise_offset", "input_perturbation", "multires_noise_iterations", "timestep_bias",
        "min_timestep", "max_timestep", "timestep_sampling", "train_new_vae"},
       "the file holds these random numbers"},
      {"replay_batches", {"train_text_encoder"}, "the file holds the text encoder's output"},
      {"replay_batches", kImageOptions, "the file holds latents"},
      {"replay_batches", {"eval_every"}, "the file has no captions and images"},
      {"encoded records", kImageOptions, "records hold latents"},
      {"encoded records", {"center_crop", "random_crop", "random_flip"}, "records hold latents"},
      {"encoded records", {"caption_dropout"}, "the embedding of the empty caption is not known"},
      {"train_text_encoder",
       {"cache_latents_text_encoder_outputs"},
       "Cannot train text encoder and cache text encoder outputs. Set either train_text_encoder or "
       "cache_latents_text_encoder_outputs to False"},
      {"placeholder_token",
       {"train_lora", "train_text_encoder", "DreamBooth", "replay_batches", "encoded records", "train_new_unet",
        "train_new_vae", "random_text_encoder", "dataset_config", "cond_image_column"},
       "the embeddings of a word are trained, by captions and images of one folder"},
      {"placeholder_token", {"embeddings", "embeddings_dir"}, "files of other words are not trained with it"},
      {"train_expert=both", {"train_text_encoder"}, "the text encoder would be trained with both experts"},
      {"train_expert=both", {"lora_init"}, "a LoRA file holds the matrices of one expert"},
      {"cond_image_column",
       {"DreamBooth", "cache_latents_text_encoder_outputs=false", "train_text_encoder"},
       "reference images are encoded once, with the texts"},
      {"cond_image_column", {"train_new_vae"}, "reference images need an autoencoder that is there"},
      {"train_new_vae", {"enable_bucket", "frame_buckets"}, "the autoencoder is trained on images of one size"},
      {"train_new_vae", {"cache_latents_text_encoder_outputs=false"}, "the scale of its latents would not be known"},
      {"train_new_vae", {"vae_file"}, "one starts from random weights, the other loads weights"},
      {"train_new_unet", {"unet_checkpoint"}, "one starts from random weights, the other loads weights"},
      {"train_new_unet", {"train_lora"}, "LoRA needs pretrained weights, to which its files belong"},
      {"conditioning_data_dir", {"alpha_mask"}, "masks come from one of them"},
      {"dataset_config",
       {"conditioning_data_dir", "cond_image_column", "max_train_samples", "dataset_type", "train_new_vae"},
       "its folders have their own"},
      {"base_weights_dtype", {"use_qwix_quantization"}, "both say what products of the denoiser are computed with"},
      {"text_encoder_base_weights_dtype",
       {"train_text_encoder", "random_text_encoder"},
       "weights in few bits are read from files and not trained"},
  };
  return rules;
}

/// Options, and the options of which each needs one.
const std::vector<Rule>& needs() {
  static const std::vector<Rule> rules = {
      {"DreamBooth", {"class_data_dir"}, "a folder for images of the subject's class"},
      {"DreamBooth", {"instance_prompt"}, "the caption of the subject"},
      {"DreamBooth", {"class_prompt"}, "the caption of its class"},
      {"placeholder_token", {"initializer_token"}, "its embeddings start as the embeddings of a word"},
      {"lora_init", {"train_lora"}, "without it there are no matrices"},
      {"base_weights_dtype", {"train_lora"}, "weights in few bits are not trained, LoRA matrices are"},
      {"blocks_to_swap", {"train_lora"}, "weights in the host's memory are not trained, LoRA matrices are"},
      {"conditioning_data_dir", {"masked_loss"}, "without it masks are not used"},
      {"masked_loss", {"alpha_mask", "conditioning_data_dir", "dataset_config"}, "masks come from there"},
      {"unmasked_weight", {"alpha_mask", "conditioning_data_dir", "dataset_config"}, "it belongs to masks"},
      {"reg_data_dir", {"dataset_config"}, "these are images of its class"},
      {"eval_every", {"eval_data_dir"}, "held-out data is read from there"},
      {"enable_generate_video_for_eval", {"eval_every"}, "samples are generated after each evaluation"},
      {"enable_generate_video_for_eval", {"prompt"}, "it names the samples"},
      {"enable_ssim", {"prompt"}, "its sample before training is compared with that after"},
  };
  return rules;
}

/// Checks the number of reference images of each image against the family's limits.
void check_references(const RunConfig& c, const Family& family) {
  const ReferenceImages* references = family.reference_images();
  const int64_t columns = std::ssize(c.source.reference_columns());
  check(columns == 0 || references, Code::invalid_config,
        "cond_image_column is '{}'; expected empty: this model takes no reference images", c.source.cond_image_column);
  // The file has the number; a dataset file's folders are checked when it is read.
  if (!references || !c.denoise.replay_batches.empty() || !c.source.dataset_config.empty()) return;
  if (columns < references->min_images)
    throw Error(Code::invalid_config, "cond_image_column is empty; expected the column of what an image is made from")
        .note("try: cond_image_column=source, and \"source\": \"FILE\" in each line of metadata.jsonl");
  check(columns <= references->max_images, Code::invalid_config,
        "cond_image_column names {} columns; this model takes {}{} reference images", columns,
        references->max_images > 1 ? "up to " : "", references->max_images);
  check(c.denoise.caption_dropout == 0 || columns == 0 || family.seen({{64, 64}}).tokens == 0, Code::invalid_config,
        "caption_dropout is {}; expected 0: this model's texts hold reference images, without which none is encoded",
        c.denoise.caption_dropout);
}

[[noreturn]] void cannot_combine(std::string_view a, std::string_view b, std::string_view reason) {
  fail(Code::invalid_config, "{} cannot be combined with {}: {}", a, b, reason);
}

}  // namespace

void KeyRules::check_training(const Family& family) const {
  const RunConfig& c = *config_;
  check(!c.denoise.train_text_encoder || family.spec().text_components().size() < 2 || c.lora.train_lora,
        Code::invalid_config,
        "train_text_encoder: models with two text encoders are trained without them, except with train_lora");
  const Options options(c);
  for (const Rule& rule : exclusive())
    for (std::string_view other : rule.others)
      if (options.use(rule.option) && options.use(other))
        cannot_combine(shown_name(rule.option), shown_name(other), rule.reason);
  for (const Rule& rule : needs()) {
    if (!options.use(rule.option)) continue;
    std::string names;
    for (std::string_view other : rule.others) names += (names.empty() ? "" : " or ") + std::string(other);
    check(std::ranges::any_of(rule.others, [&](auto other) { return options.use(other); }), Code::invalid_config,
          "{} needs {}: {}", shown_name(rule.option), names, rule.reason);
  }
  check(!options.use("placeholder_token") || c.inversion.learnable_property == "captions" ||
            (!c.source.train_data_dir.empty() && c.source.dataset_type != "synthetic"),
        Code::invalid_config,
        "placeholder_token with learnable_property={} needs train_data_dir: a folder of images; their captions are "
        "templates",
        c.inversion.learnable_property);
  check(!options.use("lora_files"), Code::invalid_config,
        "lora_files and lora_config are for generate; training starts from matrices given by lora_init");
  check(c.images.frame_buckets.empty() || family.spec().videos(), Code::invalid_config,
        "frame_buckets is given; expected empty: this model generates images");
  check(
      !c.model.train_new_vae || family.required_images() == 0, Code::invalid_config,
      "train_new_vae is true; expected false: this model starts from images, whose latents need a trained autoencoder");
  check(!c.model.train_new_vae || !family.spec().autoencoder->other_published_latents, Code::invalid_config,
        "train_new_vae: statistics of this autoencoder's latents are weights, which training does not measure");
  check_references(c, family);
  check(!c.images.original_size_conditioning || !family.spec().size_conditioning.empty(), Code::invalid_config,
        "original_size_conditioning is true; expected false: this model is not conditioned on sizes");
  constexpr int64_t kSizesOfSample = 6;  // its height and width, the crop's corner, the height and width it is seen at
  if (const auto& sizes = family.spec().size_conditioning; !sizes.empty() && sizes[0].shape.dims[0] != kSizesOfSample)
    for (const auto& [key, value] : {std::pair{"original_size_conditioning", c.images.original_size_conditioning},
                                     {"enable_bucket", c.images.enable_bucket}})
      check(!value, Code::invalid_config,
            "{} is true; expected false: this model is conditioned on an aesthetic score, which samples do not have",
            key);
}

void KeyRules::check_tfrecords() const {
  const RunConfig& c = *config_;
  check(!c.tfrecords.tfrecords_dir.empty(), Code::invalid_config,
        "tfrecords_dir is empty; expected a folder for prepare_tfrecords to write to");
  check(c.tfrecords.no_records_per_shard > 0, Code::invalid_config, "no_records_per_shard is {}; expected at least 1",
        c.tfrecords.no_records_per_shard);
  if (const TfrecordKeys& k = c.tfrecords; k.enable_eval_timesteps) {
    const auto times = static_cast<int64_t>(c.eval.timesteps_list.size());
    check(times > 0 && k.num_eval_samples > 0 && k.num_eval_samples % times == 0, Code::invalid_config,
          "num_eval_samples is {}; expected a multiple of the {} timesteps_list, as many records for each",
          k.num_eval_samples, times);
    if (!c.denoise.cache_latents_text_encoder_outputs)
      cannot_combine("enable_eval_timesteps", "cache_latents_text_encoder_outputs=false",
                     "timesteps belong to encoded records");
    if (c.images.random_flip) cannot_combine("enable_eval_timesteps", "random_flip", "every record has one timestep");
  }
  if (!c.denoise.cache_latents_text_encoder_outputs && !c.source.cond_image_column.empty())
    cannot_combine("prepare_tfrecords with cache_latents_text_encoder_outputs=false", "cond_image_column",
                   "reference images are encoded once, with the texts");
  if (c.model.train_new_vae)
    cannot_combine("prepare_tfrecords", "train_new_vae", "the autoencoder must be there before");
  const Options options(c);
  for (std::string_view other : kImageOptions)
    if (options.use(other)) cannot_combine("prepare_tfrecords", other, "it writes squares of one size");
  if (!c.denoise.cache_latents_text_encoder_outputs && c.images.random_flip)
    cannot_combine("prepare_tfrecords with cache_latents_text_encoder_outputs=false", "random_flip",
                   "it writes images as they are stored; mirror them in training");
}

}  // namespace md
