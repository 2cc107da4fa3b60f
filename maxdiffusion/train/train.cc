#include "maxdiffusion/train/train.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/picture.h"
#include "maxdiffusion/checkpoint/weights.h"
#include "maxdiffusion/data/emoji.h"
#include "maxdiffusion/data/location.h"
#include "maxdiffusion/data/pictures.h"
#include "maxdiffusion/data/source.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/tasks/autoencoder.h"
#include "maxdiffusion/tasks/latent_cache.h"
#include "maxdiffusion/tasks/latent_diffusion.h"
#include "maxdiffusion/tasks/replay.h"

namespace md {
namespace {

using nlohmann::json;

/// Where the data is; makes the emoji on first use.
DataSourceConfig source_config(const DataKeys& d) {
  DataSourceConfig s{.dataset_type = d.dataset_type,
                     .hf_train_files = d.hf_train_files,
                     .grain_train_files = d.grain_train_files,
                     .train_data_dir = d.train_data_dir,
                     .hf_data_dir = d.hf_data_dir,
                     .dataset_name = d.dataset_name,
                     .train_split = d.train_split,
                     .image_column = d.image_column,
                     .caption_column = d.caption_column,
                     .array_columns = {},
                     .mask_folder = d.conditioning_data_dir,
                     .max_train_samples = d.max_train_samples,
                     .synthetic_num_samples = d.synthetic_num_samples,
                     .resolution = d.resolution};
  const bool elsewhere = !(s.hf_train_files + s.grain_train_files + s.train_data_dir + s.hf_data_dir).empty() ||
                         d.dataset_type == "synthetic";
  if (elsewhere || d.dataset_name.empty()) return s;
  if (d.dataset_name != "noto-emoji") {
    if (!is_remote(d.dataset_name)) s.dataset_name = local_folder(d.dataset_name, "", "datasets");
    return s;
  }
  check(!d.dataset_save_location.empty(), Code::invalid_config, "dataset_name=noto-emoji needs dataset_save_location");
  s.dataset_name = fmt::format("{}/noto-emoji-{}", d.dataset_save_location, d.resolution);
  if (!exists(s.dataset_name + "/metadata.jsonl")) {
    log_info("drawing the emoji into {}", s.dataset_name);
    log_info("{} pictures", prepare_emoji(s.dataset_name, {.resolution = d.resolution}));
  }
  return s;
}

/// What the reference's caches hold, as the task's fields; see sdxl_cached_columns and laion_cached_columns.
Batch from_reference_cache(const Batch& b, const VaeConfig& vae) {
  if (b.contains("pixel_values"))
    return {{"latents", nchw_to_nhwc(b.at("pixel_values").cast(DType::f32))},
            {"prompt_embeds", b.at("prompt_embeds").cast(DType::f32)},
            {"text_embeds", b.at("text_embeds").cast(DType::f32)}};
  HostArray moments = b.at("moments").cast(DType::f32);  // mean and log-variance, not scaled
  HostArray out(moments.shape());
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
  for (size_t i = 0; i < from.size(); ++i)
    to[i] =
        static_cast<float>(i % (2 * c) < c ? (from[i] - vae.shift_factor) * vae.scaling_factor
                                           : std::exp(0.5 * std::clamp(from[i], -30.0f, 20.0f)) * vae.scaling_factor);
  return {{"moments", out}, {"prompt_embeds", b.at("clip_embeddings").cast(DType::f32)}};
}

/// With `scale_lr`, the rate times the global batch.
double scaled_rate(const OptimConfig& optim, double rate, int64_t batch) {
  return optim.scale_lr ? rate * static_cast<double>(batch) : rate;
}

LoopOptions loop_options(const RunConfig& c, const std::string& folder, const std::string& title) {
  LoopOptions o;
  o.title = title;
  o.folder = folder;
  o.checkpoint_dir = folder + "/checkpoints";
  o.step.optim = c.optim;
  o.step.scope = scope_options(c.model);
  o.seed = static_cast<uint64_t>(c.run.seed);
  o.checkpoint_every = c.run.checkpoint_every;
  o.checkpoints_to_keep = c.run.checkpoints_to_keep;
  o.reuse_example_batch = c.data.reuse_example_batch;
  o.metrics = c.metrics;
  o.compile = c.compile;
  o.run_name = c.run.run_name;
  o.texts = {{"config", "```yaml\n" + c.to_yaml() + "```"}};
  return o;
}

/// Mean and spread of latents over pictures: LDM's scaling_factor is one over their standard deviation.
double latent_scale(const HostArray& moments) {
  const int64_t c = moments.dims().back() / 2;
  auto v = moments.view<float>();
  double sum = 0, squares = 0, n = 0;
  for (size_t i = 0; i < v.size(); i += static_cast<size_t>(2 * c))
    for (int64_t k = 0; k < c; ++k) {
      const double mean = v[i + static_cast<size_t>(k)], deviation = v[i + static_cast<size_t>(c + k)];
      sum += mean, squares += mean * mean + deviation * deviation, n += 1;
    }
  return 1 / std::sqrt(std::max(squares / n - (sum / n) * (sum / n), 1e-12));
}

/// The first half of the last axis.
HostArray means(const HostArray& moments) {
  Dims dims = moments.dims();
  const int64_t c = dims.back() /= 2;
  HostArray out(Shape{DType::f32, dims});
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) to[i] = from[i / c * 2 * c + i % c];
  return out;
}

HostArray picture(const HostArray& f32_pictures, int64_t i) {
  Dims dims(f32_pictures.dims().begin() + 1, f32_pictures.dims().end());
  return to_rgb8(rows(f32_pictures, i, 1).reshaped(dims));
}

/// Originals above their reconstructions.
void write_reconstructions(PictureCoder& coder, const HostArray& pixels, const std::string& path) {
  const int64_t n = std::min<int64_t>(12, pixels.dims()[0]), stride = pixels.dims()[0] / n;
  HostArray chosen = rows(pixels, 0, n);
  for (int64_t i = 0; i < n; ++i) set_rows(chosen, i, rows(pixels, i * stride, 1));
  const HostArray decoded = coder.decode(means(coder.encode(chosen)));
  std::vector<GridCell> above, below;
  for (int64_t i = 0; i < n; ++i) {
    above.push_back({rows(chosen, i, 1).reshaped(Dims(chosen.dims().begin() + 1, chosen.dims().end())), ""});
    below.push_back({picture(decoded, i), ""});
  }
  const int64_t columns = static_cast<int64_t>(above.size());
  above.insert(above.end(), below.begin(), below.end());
  write_png(path, make_grid(above, columns, 2));
}

/// Trains an autoencoder from random weights; its values by input name.
Values train_autoencoder(const RunConfig& c, const Devices& devices, const ModelFolder& folder,
                         const LoadedPictures& pictures) {
  Autoencoder task;
  task.vae = folder.vae;
  task.batch_size =
      global_batch(c.vae.vae_per_device_batch_size, devices.mesh().devices(), "vae_per_device_batch_size");
  task.resolution = c.data.resolution;
  task.kl_weight = c.vae.vae_kl_weight;
  LoopOptions o = loop_options(c, c.folder() + "/vae", "train vae");
  o.step.optim = c.optim.with_switches(true);
  o.step.optim.max_train_steps = c.vae.vae_max_train_steps;
  o.step.optim.learning_rate_schedule_steps = -1;
  o.step.optim.learning_rate = scaled_rate(c.optim, c.vae.vae_learning_rate, task.batch_size);
  LoopCallbacks callbacks;
  callbacks.initial = [&](const ParamTable& p) { return folder.open_values(p, "vae", true, o.seed); };
  callbacks.complete = [&](CheckpointContent& content, const ParamTable&, const Values&) {
    content.files["vae/config.json"] = folder.files.at("vae/config.json");
  };
  return train_loop(devices, {&task},
                    in_memory({{"pixels", pictures.pixels}}, task.batch_size, o.seed, c.data.enable_data_shuffling), o,
                    callbacks)
      .values;
}

/// What the cached arrays depend on beside the pictures and captions: the weights and configs that made them.
std::string cache_key(const RunConfig& c, const ModelFolder& folder, const Values& vae, const TextEncoder& text) {
  std::string key = fmt::format("v1 resolution {} flip {}", c.data.resolution, c.data.random_flip);
  for (const auto& [path, content] : folder.files)
    if (path.starts_with("vae/") || path.starts_with("text_encoder")) key += "\n" + path + " " + content_hash(content);
  auto add = [&key](const std::string& name, const HostArray& a) {
    key += "\n" + name + " " + content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
  };
  for (const auto& [name, a] : vae) add(name, a);
  for (const auto& [component, weights] : text.weights())
    for (const auto& [name, a] : weights) add(component + "/" + name, a);
  return key;
}

/// Pictures [from, to) of the set in which every picture comes once as it is and then once mirrored.
HostArray with_mirrored(const HostArray& pixels, int64_t from, int64_t to) {
  const Dims& d = pixels.dims();
  HostArray out = rows(pixels, 0, to - from);
  const size_t pixel = static_cast<size_t>(d[3]) * size_of(pixels.dtype()),
               row_bytes = static_cast<size_t>(d[2]) * pixel;
  const size_t picture = static_cast<size_t>(d[1]) * row_bytes;
  for (int64_t i = from; i < to; ++i) {
    set_rows(out, i - from, rows(pixels, i % d[0], 1));
    if (i < d[0]) continue;
    std::byte* row = out.mutable_data() + static_cast<size_t>(i - from) * picture;
    for (const std::byte* end = row + picture; row < end; row += row_bytes)
      for (size_t l = 0, r = row_bytes - pixel; l < r; l += pixel, r -= pixel)
        std::swap_ranges(row + l, row + l + pixel, row + r);
  }
  return out;
}

/// `a` and then `b`.
HostArray both_rows(const HostArray& a, const HostArray& b) {
  HostArray out = rows(a, 0, a.dims()[0] + b.dims()[0]);
  set_rows(out, a.dims()[0], b);
  return out;
}

/// moments (unscaled), prompt_embeds and, for SDXL, text_embeds of every picture; with random_flip every picture is
/// there twice, once mirrored. Only what the cache does not hold is computed.
std::map<std::string, HostArray> encoded(const std::string& cache_folder, const LoadedPictures& pictures, bool flip,
                                         const std::string& key, PictureCoder& coder, TextEncoder& text) {
  const int64_t n = pictures.pixels.dims()[0], copies = flip ? 2 : 1;
  LatentCache cache(cache_folder, "pictures " + pictures.fingerprint + "\n" + key, n * copies, 512);
  if (!cache.complete()) log_info("caching latents and text embeddings in {}", cache_folder);
  ProgressBar bar("cache", n * copies);
  while (auto part = cache.next_missing()) {
    std::vector<std::string> captions;
    for (int64_t i = part->begin; i < part->end; ++i) captions.push_back(pictures.captions[static_cast<size_t>(i % n)]);
    TextEmbeddings e = text.encode(captions);
    std::map<std::string, HostArray> arrays = {
        {"moments", coder.encode(with_mirrored(pictures.pixels, part->begin, part->end))},
        {"prompt_embeds", e.prompt_embeds}};
    if (e.text_embeds) arrays["text_embeds"] = e.text_embeds;
    cache.put(*part, arrays);
    bar.update(part->end, "");
  }
  bar.finish();
  return cache.read_all();
}

/// Latents become (z − shift)·scale: the means move and stretch, the deviations stretch.
HostArray scaled(const HostArray& moments, const VaeConfig& vae) {
  HostArray out(moments.shape());
  const size_t c = static_cast<size_t>(moments.dims().back()) / 2;
  auto from = moments.view<float>();
  auto to = out.mutable_view<float>();
  for (size_t i = 0; i < from.size(); ++i) {
    const double shift = i % (2 * c) < c ? vae.shift_factor : 0;
    to[i] = static_cast<float>((from[i] - shift) * vae.scaling_factor);
  }
  return out;
}

std::set<std::string> components_of(const ParamTable& params) {
  std::set<std::string> names;
  for (const Param& p : params.params()) names.insert(p.model);
  return names;
}

Values of_component(const ParamTable& params, const std::string& component, const Values& all) {
  Values v;
  for (const Param& p : params.params())
    if (p.model == component) v[p.input] = all.at(p.input);
  return v;
}

/// The models around the one that is trained, each loaded when it is first needed.
class Companions {
 public:
  Companions(const RunConfig& c, const Devices& devices, const ModelFolder& folder)
      : config_(c), devices_(devices), folder_(folder), seed_(static_cast<uint64_t>(c.run.seed)) {}

  bool fresh(const std::string& component) const {
    const ModelKeys& m = config_.model;
    return component == "unet" ? m.train_new_unet : component == "vae" ? m.train_new_vae : m.random_text_encoder;
  }
  /// Weights before this run's training of them; those of an autoencoder that this run has trained, though.
  WeightsOf weights() {
    return [this](const ParamTable& p, const std::string& component) { return open(p, component)(); };
  }
  /// The same in two, as ModelFolder::open_values.
  std::function<Values()> open(const ParamTable& params, const std::string& component) {
    if (component == "vae") return [this, &params] { return of_component(params, "vae", vae()); };
    const std::string& other = config_.model.unet_checkpoint;
    if (component == "unet" && !other.empty() && !fresh("unet"))
      return [&params, component, other] { return ModelFolder::values_at(params, component, unet_folder(other)); };
    return folder_.open_values(params, component, fresh(component), seed_);
  }
  void set_vae(Values values) { vae_ = std::move(values); }
  const Values& vae() {
    if (vae_.empty()) vae_ = folder_.values(vae_params(folder_, DType::f32), "vae", fresh("vae"), seed_);
    return vae_;
  }
  int64_t batch() const { return 32 * devices_.mesh().devices(); }
  TextEncoder& text() {
    if (!text_) text_ = std::make_unique<TextEncoder>(devices_, folder_, batch(), weights(), config_.compile);
    return *text_;
  }
  PictureCoder& coder() {
    if (!coder_) coder_ = std::make_unique<PictureCoder>(devices_, folder_.vae, vae(), batch(), config_.compile);
    return *coder_;
  }
  /// Everything that the content of a checkpoint lacks to be a whole model folder. Weights that came from files are
  /// linked, not written.
  void complete(CheckpointContent& content) {
    for (const auto& [path, text] : folder_.files) content.files[path] = text;
    folder_.add_tokenizers(content.files);
    for (const char* component : {"unet", "vae", "text_encoder", "text_encoder_2"}) {
      if (content.weights.contains(component) || !folder_.files.contains(std::string(component) + "/config.json"))
        continue;
      if (!fresh(component)) {
        const std::string& other = config_.model.unet_checkpoint;
        const std::string from =
            component == std::string("unet") && !other.empty() ? unet_folder(other) : folder_.path + "/" + component;
        for (const std::string& file : weight_files(from))
          content.linked[std::string(component) + file.substr(file.rfind('/'))] = file;
      } else if (component == std::string("vae")) {
        content.weights["vae"] = published(vae_params(folder_, DType::f32), "vae", vae());
      } else {
        content.weights[component] = text().weights().at(component);
      }
    }
  }

 private:
  const RunConfig& config_;
  const Devices& devices_;
  const ModelFolder& folder_;
  uint64_t seed_;
  Values vae_;
  std::unique_ptr<TextEncoder> text_;
  std::unique_ptr<PictureCoder> coder_;
};

TimestepBias timestep_bias(const std::map<std::string, std::string>& members) {
  TimestepBias bias;
  for (const auto& [name, text] : members) {
    const json value = json::parse(text);
    auto number = [&] {
      check(value.is_number(), Code::invalid_config, "timestep_bias: {} is {}; expected a number", name, text);
      return value.get<double>();
    };
    if (name == "strategy") {
      check(value.is_string(), Code::invalid_config, "timestep_bias: strategy is {}; expected a text", text);
      bias.strategy = value;
    } else if (name == "multiplier") {
      bias.multiplier = number();
    } else if (name == "portion") {
      bias.portion = number();
    } else if (name == "begin") {
      bias.begin = static_cast<int64_t>(number());
    } else if (name == "end") {
      bias.end = static_cast<int64_t>(number());
    } else {
      fail(Code::invalid_config,
           "timestep_bias: there is no member '{}'; known are strategy, multiplier, portion, begin, end", name);
    }
  }
  return bias;
}

/// The noise of training: the folder's schedule, with what the run's keys say of it.
NoiseSchedule training_noise(const RunConfig& c, const ModelFolder& folder) {
  json config = parse_scheduler_config(folder.scheduler_config());
  for (const auto& [name, text] : c.sample.diffusion_scheduler_config) {
    const json value = json::parse(text);
    if (value == "" || name == "_class_name" || name == "timestep_spacing") continue;
    if (name == "rescale_zero_terminal_snr") config.erase("rescale_betas_zero_snr");
    config[name] = value;
  }
  if (!c.model.prediction_type.empty()) config["prediction_type"] = c.model.prediction_type;
  return NoiseSchedule::from_json(config);
}

/// Token ids s32 [N, L] of captions.
HostArray token_ids(const ClipTokenizer& tokenizer, const std::vector<std::string>& captions, int64_t length) {
  HostArray out(Shape{DType::s32, {static_cast<int64_t>(captions.size()), length}});
  auto v = out.mutable_view<int32_t>();
  int64_t cut = 0;
  for (size_t i = 0; i < captions.size(); ++i) {
    bool truncated = false;
    const std::vector<int32_t> row = tokenizer.encode(captions[i], length, &truncated);
    cut += truncated;
    std::copy(row.begin(), row.end(), v.begin() + static_cast<int64_t>(i) * length);
  }
  if (cut > 0) log_warning("{} captions are longer than {} tokens and are cut", cut, length);
  return out;
}

HostArray without_batch(const HostArray& a) { return a.reshaped(Dims(a.dims().begin() + 1, a.dims().end())); }

/// Refuses buckets, masks and original sizes by name: `what` brings its pictures another way.
void check_plain_pictures(const RunConfig& c, const std::string& what) {
  for (const auto& [key, set] :
       {std::pair{"enable_bucket", c.data.enable_bucket}, std::pair{"masked_loss", c.loss.masked_loss},
        std::pair{"alpha_mask", c.data.alpha_mask},
        std::pair{"original_size_conditioning", c.data.original_size_conditioning}})
    check(!set, Code::invalid_config, "{} does not go with {}", key, what);
}

/// Samples of one update.
int64_t update_size(const RunConfig& c, const LatentDiffusion& task) {
  return task.batch_size * c.loss.gradient_accumulation_steps;
}

/// Pictures of the subject and of its class, pair by pair; the shorter set begins again until both are as long.
std::unique_ptr<Dataset> dreambooth_data(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                                         LatentDiffusion& task) {
  const DreamboothKeys& k = c.dreambooth;
  const PictureConfig images{.resolution = c.data.resolution, .center_crop = c.data.center_crop};
  auto load = [&](const std::string& folder) {
    return load_pictures(open_source({.dataset_type = "image_folder", .train_data_dir = folder}), images);
  };
  LoadedPictures instances = load(k.instance_data_dir), classes = load(k.class_data_dir);
  std::fill(instances.captions.begin(), instances.captions.end(), k.instance_prompt);
  std::fill(classes.captions.begin(), classes.captions.end(), k.class_prompt);
  const int64_t n = std::max(instances.pixels.dims()[0], classes.pixels.dims()[0]);
  log_info("DreamBooth: {} pictures of the subject, {} of its class", instances.pixels.dims()[0],
           classes.pixels.dims()[0]);
  task.prior_loss_weight = k.prior_loss_weight;
  task.from_ids = c.loss.train_text_encoder;
  const std::string cache_folder =
      (c.data.dataset_save_location.empty() ? c.folder() : c.data.dataset_save_location) + "/cache";
  Values arrays;
  for (const auto& [prefix, pictures] : {std::pair{"", &instances}, std::pair{"class_", &classes}}) {
    Values part =
        encoded(cache_folder, *pictures, false,
                "caption " + pictures->captions[0] + "\n" + cache_key(c, folder, companions.vae(), companions.text()),
                companions.coder(), companions.text());
    part["moments"] = scaled(part.at("moments"), folder.vae);
    if (task.from_ids) {
      part.erase("prompt_embeds");
      part["ids"] = token_ids(*folder.tokenizer, pictures->captions, task.text_length);
    }
    const int64_t own = pictures->pixels.dims()[0];
    for (const auto& [name, a] : part) {
      Dims dims = a.dims();
      dims[0] = n;
      HostArray all(Shape{a.dtype(), dims});
      for (int64_t i = 0; i < n; i += own) set_rows(all, i, a);
      arrays[prefix + name] = all;
    }
  }
  return in_memory(arrays, update_size(c, task), static_cast<uint64_t>(c.run.seed), c.data.enable_data_shuffling);
}

/// How pictures are made ready.
PictureConfig picture_config(const RunConfig& c, const ModelFolder& folder) {
  const DataKeys& d = c.data;
  const int64_t down = folder.vae.downscale();
  PictureConfig p{.resolution = d.resolution,
                  .center_crop = d.center_crop,
                  .random_crop = d.random_crop,
                  .random_flip = d.random_flip,
                  .mask = d.alpha_mask         ? MaskFrom::alpha
                          : c.loss.masked_loss ? MaskFrom::record
                                               : MaskFrom::none,
                  .mask_downscale = down,
                  .sizes = folder.unet.addition_embed_type && (d.enable_bucket || d.original_size_conditioning)};
  if (!d.enable_bucket) return p;
  const int64_t unit = down << (folder.unet.block_out_channels.size() - 1);
  check(d.bucket_reso_steps % unit == 0, Code::invalid_config,
        "bucket_reso_steps is {}; expected a multiple of {}, by which this autoencoder and UNet shrink a picture",
        d.bucket_reso_steps, unit);
  if (d.bucket_no_upscale) log_info("bucket_no_upscale: min_bucket_reso and max_bucket_reso do not count");
  p.buckets.emplace(
      BucketConfig{d.resolution, d.min_bucket_reso, d.max_bucket_reso, d.bucket_reso_steps, d.bucket_no_upscale});
  return p;
}

/// Batches, and the sizes of their pictures; empty: all have the task's.
struct TrainingData {
  std::unique_ptr<Dataset> batches;
  std::vector<PictureSize> buckets = {};
};

/// The task in each size.
std::vector<LatentDiffusion> in_sizes(const LatentDiffusion& task, const std::vector<PictureSize>& buckets) {
  if (buckets.empty()) return {task};
  std::vector<LatentDiffusion> tasks;
  for (const PictureSize& size : buckets) {
    LatentDiffusion t = task;
    t.latent_height = size.height / task.folder.vae.downscale();
    t.latent_width = size.width / task.folder.vae.downscale();
    t.bucket = true;
    tasks.push_back(std::move(t));
  }
  return tasks;
}

/// What the UNet is trained on: sets the task's sizes and the arrays that are the same every step.
TrainingData training_data(const RunConfig& c, const Devices& devices, ModelFolder& folder, Companions& companions,
                           LatentDiffusion& task, Values& constants) {
  const uint64_t seed = static_cast<uint64_t>(c.run.seed);
  if (!c.loss.replay_batches.empty()) {
    Replay replay = open_replay(c.loss.replay_batches, folder.unet.addition_embed_type.has_value());
    check(c.optim.max_train_steps <= replay.steps, Code::invalid_config,
          "max_train_steps is {}, replay_batches '{}' holds {} steps", c.optim.max_train_steps, c.loss.replay_batches,
          replay.steps);
    task.replay = true;
    check(replay.batch_size % c.loss.gradient_accumulation_steps == 0, Code::invalid_config,
          "replay_batches '{}' holds {} pictures a step, which {} gradient_accumulation_steps do not divide",
          c.loss.replay_batches, replay.batch_size, c.loss.gradient_accumulation_steps);
    task.batch_size = replay.batch_size / c.loss.gradient_accumulation_steps;
    task.latent_height = replay.latent_height, task.latent_width = replay.latent_width;
    task.text_length = replay.text_length;
    return {std::move(replay.data)};
  }
  task.batch_size = global_batch(c.data.per_device_batch_size, devices.mesh().devices());
  task.resolution = c.data.resolution;
  task.latent_height = task.latent_width = c.data.resolution / folder.vae.downscale();
  task.text_length = folder.text_encoder.max_position_embeddings;
  if (!c.dreambooth.instance_data_dir.empty()) return {dreambooth_data(c, folder, companions, task)};

  DataSourceConfig where = source_config(c.data);
  const BatchConfig batches{.stream = {.seed = seed, .shuffle = c.data.enable_data_shuffling},
                            .batch = update_size(c, task),
                            .workers = static_cast<int>(c.data.grain_worker_count)};
  const bool cached = c.loss.cache_latents_text_encoder_outputs;
  if (cached && (c.data.dataset_type == "tfrecord" || c.data.dataset_type == "grain")) {
    // Latents and embeddings that another program computed.
    check_plain_pictures(c, "cached latents of dataset_type " + c.data.dataset_type);
    const bool micro = folder.unet.addition_embed_type.has_value();
    where.array_columns = micro ? sdxl_cached_columns() : laion_cached_columns();
    check(c.data.caption_dropout == 0, Code::invalid_config,
          "caption_dropout with cached latents of {}: the embedding of the empty caption is not known",
          c.data.dataset_type);
    auto data = mapped(array_batches(open_source(where), batches),
                       [vae = folder.vae](const Batch& b) { return from_reference_cache(b, vae); });
    const Batch first = data->next();
    data->seek({});
    const Dims latents = first.at(micro ? "latents" : "moments").dims();
    task.from_latents = micro;
    task.latent_height = latents[1], task.latent_width = latents[2];
    task.text_length = first.at("prompt_embeds").dims()[1];
    return {std::move(data)};
  }
  const PictureConfig images = picture_config(c, folder);
  task.masked = images.mask != MaskFrom::none;
  task.sizes = images.sizes;
  if (!cached) {
    check(!c.model.train_new_vae, Code::invalid_config,
          "train_new_vae with cache_latents_text_encoder_outputs=false: the scale of its latents would not be known");
    task.caption_dropout = c.data.caption_dropout;
    task.from_pixels = task.from_ids = true;
    std::vector<std::pair<std::string, std::shared_ptr<ClipTokenizer>>> tokenizers = {{"ids", folder.tokenizer}};
    if (folder.tokenizer_2) tokenizers.push_back({"ids_2", folder.tokenizer_2});
    auto ids = [tokenizers, length = task.text_length](const std::vector<std::string>& captions) {
      Batch b;
      for (const auto& [name, tokenizer] : tokenizers) b[name] = token_ids(*tokenizer, captions, length);
      return b;
    };
    for (const auto& [name, a] : ids({""})) constants["empty_" + name] = without_batch(a);
    if (!images.buckets) return {picture_batches(open_source(where), images, batches, ids)};
    PicturesInBuckets sorted = sort_into_buckets(open_source(where), images);
    std::vector<int64_t> counts;
    for (const auto& records : sorted.records) counts.push_back(static_cast<int64_t>(records.size()));
    const std::vector<PictureSize> sizes = sorted.sizes;
    log_buckets(sizes, counts, 1, batches.batch);
    return {picture_batches(std::move(sorted), images, batches, ids), sizes};
  }
  const std::vector<LoadedPictures> groups = load_in_buckets(open_source(where), images);
  std::vector<PictureSize> sizes;
  std::vector<int64_t> counts;
  for (const LoadedPictures& g : groups) {
    counts.push_back(g.pixels.dims()[0]);
    sizes.push_back({g.pixels.dims()[1], g.pixels.dims()[2]});
  }
  log_info("{} pictures, {} skipped", std::accumulate(counts.begin(), counts.end(), int64_t{0}),
           groups[0].skipped.size());
  const int64_t copies = c.data.random_flip ? 2 : 1;
  if (images.buckets) log_buckets(sizes, counts, copies, batches.batch);
  task.caption_dropout = c.data.caption_dropout;

  if (c.model.train_new_vae) companions.set_vae(train_autoencoder(c, devices, folder, groups[0]));
  PictureCoder& coder = companions.coder();
  TextEncoder& text = companions.text();
  if (c.model.train_new_vae) {
    const std::string path = c.folder() + "/samples/reconstructions.png";
    write_reconstructions(coder, groups[0].pixels, path);
    log_info("autoencoder: originals above reconstructions in {}", path);
  }
  const std::string cache_folder =
      (c.data.dataset_save_location.empty() ? c.folder() : c.data.dataset_save_location) + "/cache";
  std::vector<Batch> arrays;
  const std::string key = cache_key(c, folder, companions.vae(), text);
  for (const LoadedPictures& g : groups)
    arrays.push_back(encoded(cache_folder, g, c.data.random_flip, key, coder, text));
  if (c.model.train_new_vae) {
    folder.vae.scaling_factor = latent_scale(arrays[0].at("moments"));
    json config = json::parse(folder.files.at("vae/config.json"));
    config["scaling_factor"] = folder.vae.scaling_factor;
    folder.files["vae/config.json"] = config.dump(2) + "\n";
    log_info("autoencoder: scaling_factor {:.5f} (one over the latents' standard deviation)",
             folder.vae.scaling_factor);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const LoadedPictures& g = groups[i];
    arrays[i]["moments"] = scaled(arrays[i].at("moments"), folder.vae);
    if (g.mask) arrays[i]["mask"] = with_mirrored(g.mask, 0, copies * counts[i]);
    if (g.time_ids) arrays[i]["time_ids"] = copies == 1 ? g.time_ids : both_rows(g.time_ids, g.mirrored_time_ids);
  }
  if (c.data.caption_dropout > 0) {
    TextEmbeddings empty = text.encode({""});
    constants["empty_prompt_embeds"] = without_batch(empty.prompt_embeds);
    if (empty.text_embeds) constants["empty_text_embeds"] = without_batch(empty.text_embeds);
  }
  if (images.buckets) return {in_buckets(std::move(arrays), batches.batch, batches.stream), sizes};
  return {in_memory(std::move(arrays[0]), batches.batch, seed, c.data.enable_data_shuffling)};
}

/// A phase of the run from now on: told in the log and, where a key asks for it, in a file.
class Phase {
 public:
  Phase(const RunConfig& c, std::string name) : name_(std::move(name)) {
    if (c.run.write_timing_metrics) file_ = c.run.timing_metrics_file;
    tell(fmt::format("Starting: {}...", name_));
  }
  Phase(const Phase&) = delete;
  ~Phase() {
    tell(fmt::format("Finished: {} - Duration: {:.4f} seconds", name_,
                     std::chrono::duration<double>(Clock::now() - start_).count()));
  }

 private:
  using Clock = std::chrono::steady_clock;
  void tell(const std::string& line) {
    log_info("{}", line);
    if (file_.empty()) return;
    try {
      FileWriter w(file_, FileWriter::Open::append);
      w.write((line + "\n").data(), line.size() + 1);
    } catch (const Error& e) {
      log_warning("timing_metrics_file ends here, the run goes on: {}", e.what());
      file_.clear();
    }
  }
  std::string name_, file_;
  Clock::time_point start_ = Clock::now();
};

/// Starting values of the matrices, of `lora_init` or drawn; made when called.
std::function<Values()> first_lora(const RunConfig& c, const ModelFolder& folder, const ParamTable& params) {
  std::vector<std::string> targets = training_lora(c.lora, "unet").targets;
  if (c.loss.train_text_encoder && c.lora.lora_target_modules.empty()) {
    const std::vector<std::string> more = training_lora(c.lora, "text_encoder").targets;
    targets.insert(targets.end(), more.begin(), more.end());
  }
  check_lora_targets(targets, params);
  if (c.lora.lora_init.empty())
    return [&params, seed = static_cast<uint64_t>(c.run.seed)] { return initial_lora(params, seed); };
  const Values values = initial_lora(params, read_lora(c.lora.lora_init, LoraTargets(denoiser_params(folder))),
                                     training_lora(c.lora, "unet"));
  return [values] { return values; };
}

/// What the reference refuses before it starts, too, and keys that do not go together.
void validate(const RunConfig& c, const ModelFolder& folder) {
  check(!c.loss.train_text_encoder || !folder.text_encoder_2 || c.lora.train_lora, Code::invalid_config,
        "train_text_encoder: models with two text encoders are trained without them, except with train_lora");
  check(chosen_loras(c.lora).empty(), Code::invalid_config,
        "lora_files and lora_config are for generate; training starts from matrices given by lora_init");
  check(c.lora.train_lora || c.lora.lora_init.empty(), Code::invalid_config, "lora_init needs train_lora=true");
  const bool dreambooth = !c.dreambooth.instance_data_dir.empty();
  if (dreambooth) {
    for (const auto& [key, text] : {std::pair{"class_data_dir", c.dreambooth.class_data_dir},
                                    std::pair{"instance_prompt", c.dreambooth.instance_prompt},
                                    std::pair{"class_prompt", c.dreambooth.class_prompt}})
      check(!text.empty(), Code::invalid_config, "DreamBooth (instance_data_dir is set) needs {}", key);
    check(
        c.loss.replay_batches.empty() && !c.model.train_new_vae && c.data.caption_dropout == 0 && c.loss.snr_gamma <= 0,
        Code::invalid_config,
        "DreamBooth goes with neither replay_batches, train_new_vae, caption_dropout nor snr_gamma");
  }
  check(!c.loss.train_text_encoder || dreambooth || !c.loss.cache_latents_text_encoder_outputs, Code::invalid_config,
        "Cannot train text encoder and cache text encoder outputs. Set either train_text_encoder or "
        "cache_latents_text_encoder_outputs to False");
  check(!c.loss.train_text_encoder || c.loss.replay_batches.empty(), Code::invalid_config,
        "train_text_encoder with replay_batches: the file holds what the text encoder has made");
  if (dreambooth) check_plain_pictures(c, "DreamBooth");
  if (!c.loss.replay_batches.empty()) check_plain_pictures(c, "replay_batches");
  check(!c.data.enable_bucket || !c.model.train_new_vae, Code::invalid_config,
        "enable_bucket does not go with train_new_vae, which learns from pictures of one size");
  check(!c.data.original_size_conditioning || folder.unet.addition_embed_type, Code::invalid_config,
        "original_size_conditioning: this UNet is not told sizes; only SDXL's are");
  const bool folder_of_masks = !c.data.conditioning_data_dir.empty();
  check(!folder_of_masks || !c.data.alpha_mask, Code::invalid_config,
        "alpha_mask and conditioning_data_dir are both set; masks come from one of them");
  check(!folder_of_masks || c.loss.masked_loss, Code::invalid_config, "conditioning_data_dir needs masked_loss=true");
  check(!c.loss.masked_loss || c.data.alpha_mask || folder_of_masks, Code::invalid_config,
        "masked_loss needs masks: alpha_mask=true, or conditioning_data_dir=FOLDER");
}

}  // namespace

void train(const RunConfig& c, const OnSample& on_sample) {
  const std::string run = c.folder(), samples = run + "/samples";
  auto phase = std::make_unique<Phase>(c, "devices and model folder");
  const Devices devices = open_devices(c);
  ModelFolder folder =
      ModelFolder::open(c.model.pretrained_model_name_or_path, c.model.clip_bpe_file, c.model.revision);
  validate(c, folder);
  make_folders(samples);
  write_file_atomic(run + "/config.yml", c.to_yaml());
  if (c.run.save_config_to_gcs) {
    check(!c.run.base_output_directory.empty(), Code::invalid_config, "save_config_to_gcs needs base_output_directory");
    const std::string copy = c.run.base_output_directory + "/" + c.run.run_name;
    make_folders(copy);
    write_file_atomic(copy + "/config.yml", c.to_yaml());
  }
  phase.reset();

  Companions companions(c, devices, folder);
  LatentDiffusion task;
  LoopCallbacks callbacks;
  task.noise = training_noise(c, folder);
  task.timestep_bias = timestep_bias(c.loss.timestep_bias);
  task.snr_gamma = c.loss.snr_gamma;
  task.noise_offset = c.loss.noise_offset;
  task.input_perturbation = c.loss.input_perturbation;
  phase = std::make_unique<Phase>(c, "data");
  TrainingData training = training_data(c, devices, folder, companions, task, callbacks.constants);
  std::unique_ptr<Dataset> data = std::move(training.batches);
  task.folder = folder;
  const std::vector<LatentDiffusion> tasks = in_sizes(task, training.buckets);
  phase.reset();

  LoopOptions o = loop_options(c, run, "train unet");
  const int64_t update = update_size(c, task);
  o.step.optim = c.optim.with_switches(!folder.text_encoder_2);
  o.step.optim.learning_rate = scaled_rate(c.optim, c.optim.learning_rate, update);
  if (o.step.optim.max_train_steps <= 0) {
    check(c.loss.num_train_epochs > 0, Code::invalid_config,
          "You must set max_train_steps or num_train_epochs to a positive integer");
    check(data->size() > 0, Code::invalid_config,
          "max_train_steps is {}, and the number of samples is not known before they are read; give max_train_steps",
          c.optim.max_train_steps);
    o.step.optim.max_train_steps = std::max<int64_t>(1, c.loss.num_train_epochs * data->size() / update);
  }
  if (o.step.optim.max_grad_norm > 0) log_info("gradients are clipped to norm {}", o.step.optim.max_grad_norm);
  o.step.accumulation = c.loss.gradient_accumulation_steps;
  o.step.ema_decay = c.loss.ema_decay;
  o.step.learning_rates["text_encoder"] = scaled_rate(c.optim, c.loss.text_encoder_learning_rate, update);
  o.step.learning_rates["text_encoder_2"] = o.step.learning_rates["text_encoder"];
  const bool lora = c.lora.train_lora;
  o.step.variation = [&c, lora](const std::string& component, const Scope& s) {
    const bool learned = component == "unet" || (component.starts_with("text_encoder") && c.loss.train_text_encoder);
    if (learned) return lora ? lora_scope(s, training_lora(c.lora, component)) : s;
    ScopeOptions plain = s.options();  // companions compute in float32, as they do outside of the step
    plain.weights = plain.activations = DType::f32;
    return s.with(plain).frozen();
  };
  o.sample_every = c.sample.sample_every;
  o.save_final_checkpoint = c.run.save_final_checkpoint;

  callbacks.initial = [&](const ParamTable& p) {
    auto base = std::make_shared<const ParamTable>(base_params(p));
    std::vector<std::function<Values()>> parts;
    for (const std::string& component : components_of(*base)) parts.push_back(companions.open(*base, component));
    if (std::any_of(p.params().begin(), p.params().end(), is_lora)) parts.push_back(first_lora(c, folder, p));
    return [parts, base] {
      Values all;
      for (const auto& part : parts) all.merge(part());
      return all;
    };
  };
  callbacks.complete = [&](CheckpointContent& content, const ParamTable& params, const Values& trained) {
    companions.complete(content);
    if (!lora) return;
    content.more = [file = trained_lora(params, trained, training_lora(c.lora, "unet")),
                    two = folder.text_encoder_2.has_value()](const std::string& to) {
      write_peft_lora(to, file);
      write_kohya_lora(to + "/lora_kohya.safetensors", file, two);
    };
  };
  auto draw = [&](int64_t step, const ParamTable& params, const Values& trained) {
    if (!on_sample || c.sample.prompt.empty()) return;
    const WeightsOf weights = [&](const ParamTable& p, const std::string& component) {
      const bool learned = std::any_of(params.params().begin(), params.params().end(),
                                       [&](const Param& q) { return q.trainable && q.model == component; });
      if (learned && !lora) return of_component(p, component, trained);
      Values values = companions.weights()(p, component);
      if (learned) merge_loras({{trained_lora(params, trained, training_lora(c.lora, "unet")), 1}}, p, values);
      return values;
    };
    std::unique_ptr<TextEncoder> own;
    if (c.loss.train_text_encoder)
      own = std::make_unique<TextEncoder>(devices, folder, companions.batch(), weights, c.compile);
    const std::string path =
        on_sample({devices, c, folder, weights, own ? *own : companions.text(), companions.coder(), step, samples});
    if (!path.empty()) log_info("pictures of step {}: {}", step, path);
  };
  if (o.sample_every > 0) callbacks.sample = draw;
  phase = std::make_unique<Phase>(c, "training");
  std::vector<const Task*> all_tasks;
  for (const LatentDiffusion& t : tasks) all_tasks.push_back(&t);
  Trained t = train_loop(devices, all_tasks, std::move(data), o, callbacks);
  phase.reset();
  if (o.sample_every != 0) draw(t.steps, t.params, t.values);
}

}  // namespace md
