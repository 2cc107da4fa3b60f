#include "maxdiffusion/train/training_data.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/hub_cache.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/images/emoji.h"
#include "maxdiffusion/data/storage/location.h"
#include "maxdiffusion/tasks/replay.h"
#include "maxdiffusion/train/encoded.h"
#include "maxdiffusion/train/train_autoencoder.h"

namespace md {
namespace {

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

/// `a` and then `b`.
HostArray both_rows(const HostArray& a, const HostArray& b) {
  HostArray out = rows(a, 0, a.dims()[0] + b.dims()[0]);
  set_rows(out, a.dims()[0], b);
  return out;
}

/// Pictures of the subject and of its class, pair by pair; the shorter set begins again until both are as long.
std::unique_ptr<Dataset> dreambooth_data(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                                         LatentDiffusion& task) {
  const DreamboothKeys& k = c.dreambooth;
  const ImageConfig images{.resolution = c.data.resolution, .center_crop = c.data.center_crop};
  auto load = [&](const std::string& folder) {
    return load_images(open_source({.dataset_type = "image_folder", .train_data_dir = folder}), images);
  };
  LoadedImages instances = load(k.instance_data_dir), classes = load(k.class_data_dir);
  std::fill(instances.captions.begin(), instances.captions.end(), k.instance_prompt);
  std::fill(classes.captions.begin(), classes.captions.end(), k.class_prompt);
  const int64_t n = std::max(instances.pixels.dims()[0], classes.pixels.dims()[0]);
  log_info("DreamBooth: {} pictures of the subject, {} of its class", instances.pixels.dims()[0],
           classes.pixels.dims()[0]);
  task.prior_loss_weight = k.prior_loss_weight;
  task.from_ids = c.loss.train_text_encoder;
  HostArrays arrays;
  for (const auto& [prefix, pictures] : {std::pair{"", &instances}, std::pair{"class_", &classes}}) {
    const HostArrays part =
        cached_fields(c, folder, companions, task, *pictures, "caption " + pictures->captions[0] + "\n");
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
ImageConfig picture_config(const RunConfig& c, const ModelFolder& folder) {
  const DataKeys& d = c.data;
  const int64_t down = folder.vae.downscale();
  ImageConfig p{.resolution = d.resolution,
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
      AspectBucketConfig{d.resolution, d.min_bucket_reso, d.max_bucket_reso, d.bucket_reso_steps, d.bucket_no_upscale});
  return p;
}

/// Whether records are latents and embeddings that another program computed.
bool from_arrays(const RunConfig& c) {
  return c.loss.cache_latents_text_encoder_outputs &&
         (c.data.dataset_type == "tfrecord" || c.data.dataset_type == "grain");
}

std::vector<std::string> cached_columns(const ModelFolder& folder) {
  return folder.unet.addition_embed_type ? sdxl_cached_columns() : laion_cached_columns();
}

/// The batches of a recorded run.
std::unique_ptr<Dataset> replayed(const RunConfig& c, const ModelFolder& folder, LatentDiffusion& task) {
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
  return std::move(replay.data);
}

/// Latents and embeddings that another program computed.
std::unique_ptr<Dataset> from_reference_caches(const RunConfig& c, const ModelFolder& folder, DataSourceConfig where,
                                               const BatchConfig& batches, LatentDiffusion& task) {
  check_plain_pictures(c, "cached latents of dataset_type " + c.data.dataset_type);
  const bool micro = folder.unet.addition_embed_type.has_value();
  where.array_columns = cached_columns(folder);
  check(c.data.caption_dropout == 0, Code::invalid_config,
        "caption_dropout with cached latents of {}: the embedding of the empty caption is not known",
        c.data.dataset_type);
  check(!c.data.center_crop && !c.data.random_crop && !c.data.random_flip, Code::invalid_config,
        "center_crop, random_crop and random_flip go with pictures, not with cached latents of {}",
        c.data.dataset_type);
  auto data = mapped(array_batches(open_source(where), batches),
                     [vae = folder.vae](const Batch& b) { return from_reference_cache(b, vae); });
  const Batch first = data->next();
  data->seek({});
  const Dims latents = first.at(micro ? "latents" : "moments").dims();
  task.from_latents = micro;
  task.latent_height = latents[1], task.latent_width = latents[2];
  task.text_length = first.at("prompt_embeds").dims()[1];
  return data;
}

/// Pictures as they are read, and token ids.
TrainingData encoded_in_step(const RunConfig& c, const ModelFolder& folder, std::shared_ptr<const RecordSource> source,
                             const ImageConfig& images, const BatchConfig& batches, LatentDiffusion& task,
                             HostArrays& constants) {
  check(!c.model.train_new_vae, Code::invalid_config,
        "train_new_vae with cache_latents_text_encoder_outputs=false: the scale of its latents would not be known");
  task.from_pixels = task.from_ids = true;
  std::vector<std::pair<std::string, std::shared_ptr<ClipTokenizer>>> tokenizers = {{"ids", folder.tokenizer}};
  if (folder.tokenizer_2) tokenizers.push_back({"ids_2", folder.tokenizer_2});
  auto ids = [tokenizers, length = task.text_length](const std::vector<std::string>& captions) {
    Batch b;
    for (const auto& [name, tokenizer] : tokenizers) b[name] = token_ids(*tokenizer, captions, length);
    return b;
  };
  for (const auto& [name, a] : ids({""})) constants["empty_" + name] = without_batch(a);
  if (!images.buckets) return {image_batches(source, images, batches, ids)};
  ImagesInBuckets sorted = sort_into_aspect_buckets(source, images);
  std::vector<int64_t> counts;
  for (const auto& records : sorted.records) counts.push_back(static_cast<int64_t>(records.size()));
  const std::vector<ImageSize> sizes = sorted.sizes;
  log_aspect_buckets(sizes, counts, 1, batches.batch);
  return {image_batches(std::move(sorted), images, batches, ids), sizes};
}

/// Pictures encoded beforehand, by an autoencoder that is trained first where a key asks for it.
TrainingData encoded_before(const RunConfig& c, const Devices& devices, ModelFolder& folder, Companions& companions,
                            std::shared_ptr<const RecordSource> source, const ImageConfig& images,
                            const BatchConfig& batches, HostArrays& constants) {
  const std::vector<LoadedImages> groups = load_in_aspect_buckets(source, images);
  std::vector<ImageSize> sizes;
  std::vector<int64_t> counts;
  for (const LoadedImages& g : groups) {
    counts.push_back(g.pixels.dims()[0]);
    sizes.push_back({g.pixels.dims()[1], g.pixels.dims()[2]});
  }
  log_info("{} pictures, {} skipped", std::accumulate(counts.begin(), counts.end(), int64_t{0}),
           groups[0].skipped.size());
  const int64_t copies = c.data.random_flip ? 2 : 1;
  if (images.buckets) log_aspect_buckets(sizes, counts, copies, batches.batch);

  if (c.model.train_new_vae) {
    companions.set_vae(train_autoencoder(c, devices, folder, groups[0]));
    const std::string path = c.folder() + "/samples/reconstructions.png";
    write_reconstructions(companions.coder(), groups[0].pixels, path);
    log_info("autoencoder: originals above reconstructions in {}", path);
  }
  std::vector<Batch> arrays;
  const std::string key = cache_key(c, folder, companions);
  for (const LoadedImages& g : groups) arrays.push_back(encoded(c, companions, g, c.data.random_flip, key));
  if (c.model.train_new_vae) {
    folder.vae.scaling_factor = latent_scale(arrays[0].at("moments"));
    nlohmann::json config = nlohmann::json::parse(folder.files.at("vae/config.json"));
    config["scaling_factor"] = folder.vae.scaling_factor;
    folder.files["vae/config.json"] = config.dump(2) + "\n";
    log_info("autoencoder: scaling_factor {:.5f} (one over the latents' standard deviation)",
             folder.vae.scaling_factor);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const LoadedImages& g = groups[i];
    arrays[i]["moments"] = scaled(arrays[i].at("moments"), folder.vae);
    if (g.mask) arrays[i]["mask"] = with_mirrored(g.mask, 0, copies * counts[i]);
    if (g.time_ids) arrays[i]["time_ids"] = copies == 1 ? g.time_ids : both_rows(g.time_ids, g.mirrored_time_ids);
  }
  if (c.data.caption_dropout > 0) {
    TextEmbeddings empty = companions.text().encode({""});
    constants["empty_prompt_embeds"] = without_batch(empty.prompt_embeds);
    if (empty.text_embeds) constants["empty_text_embeds"] = without_batch(empty.text_embeds);
  }
  if (images.buckets) return {in_aspect_buckets(std::move(arrays), batches.batch, batches.stream), sizes};
  return {in_memory(std::move(arrays[0]), batches.batch, batches.stream.seed, batches.stream.shuffle)};
}

}  // namespace

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

void check_plain_pictures(const RunConfig& c, const std::string& what) {
  for (const auto& [key, set] :
       {std::pair{"enable_bucket", c.data.enable_bucket}, std::pair{"masked_loss", c.loss.masked_loss},
        std::pair{"alpha_mask", c.data.alpha_mask},
        std::pair{"original_size_conditioning", c.data.original_size_conditioning},
        std::pair{"conditioning_data_dir", !c.data.conditioning_data_dir.empty()}})
    check(!set, Code::invalid_config, "{} does not go with {}", key, what);
}

int64_t update_size(const RunConfig& c, const LatentDiffusion& task) {
  return task.batch_size * c.loss.gradient_accumulation_steps;
}

std::vector<LatentDiffusion> in_sizes(const LatentDiffusion& task, const std::vector<ImageSize>& buckets) {
  if (buckets.empty()) return {task};
  std::vector<LatentDiffusion> tasks;
  for (const ImageSize& size : buckets) {
    LatentDiffusion t = task;
    t.latent_height = size.height / task.folder.vae.downscale();
    t.latent_width = size.width / task.folder.vae.downscale();
    t.bucket = true;
    tasks.push_back(std::move(t));
  }
  return tasks;
}

Batch held_out_fields(const RunConfig& c, const ModelFolder& folder, Companions& companions,
                      const LatentDiffusion& task) {
  check(!c.eval.eval_data_dir.empty(), Code::invalid_config, "eval_every needs eval_data_dir");
  check(!task.replay, Code::invalid_config, "eval_every does not go with replay_batches");
  DataSourceConfig where{.dataset_type = from_arrays(c) ? c.data.dataset_type : "",
                         .train_data_dir = c.eval.eval_data_dir,
                         .train_split = c.data.train_split,
                         .image_column = c.data.image_column,
                         .caption_column = c.data.caption_column,
                         .max_train_samples = c.eval.eval_max_number_of_samples_in_bucket};
  if (!from_arrays(c)) {
    const LoadedImages pictures = load_images(
        open_source(where), {.resolution = c.data.resolution, .center_crop = c.data.center_crop || c.data.random_crop});
    return cached_fields(c, folder, companions, task, pictures);
  }
  where.array_columns = cached_columns(folder);
  RecordStream stream(open_source(where), {.shuffle = false});
  std::vector<Record> records;
  for (auto next = stream.next(); next.epoch == 0; next = stream.next()) records.push_back(next.read());
  Batch all;
  for (size_t i = 0; i < records.size(); ++i)
    for (const auto& [name, a] : records[i].arrays) {
      Dims dims = a.dims();
      dims.insert(dims.begin(), static_cast<int64_t>(records.size()));
      if (i == 0) all[name] = HostArray(Shape{a.dtype(), dims});
      dims[0] = 1;
      check(all.contains(name) && all.at(name).bytes() == a.bytes() * records.size(), Code::io,
            "{}: '{}' is {}, unlike that of the records before", records[i].name, name, to_string(a.shape()));
      set_rows(all[name], static_cast<int64_t>(i), a.reshaped(dims));
    }
  return from_reference_cache(all, folder.vae);
}

TrainingData training_data(const RunConfig& c, const Devices& devices, ModelFolder& folder, Companions& companions,
                           LatentDiffusion& task, HostArrays& constants) {
  if (!c.loss.replay_batches.empty()) return {replayed(c, folder, task)};
  task.batch_size = global_batch(c.data.per_device_batch_size, devices.mesh().devices());
  task.resolution = c.data.resolution;
  task.latent_height = task.latent_width = c.data.resolution / folder.vae.downscale();
  task.text_length = folder.text_encoder.max_position_embeddings;
  if (!c.dreambooth.instance_data_dir.empty()) return {dreambooth_data(c, folder, companions, task)};

  const DataSourceConfig where = source_config(c.data);
  const BatchConfig batches{
      .stream = {.seed = static_cast<uint64_t>(c.run.seed), .shuffle = c.data.enable_data_shuffling},
      .batch = update_size(c, task),
      .workers = static_cast<int>(c.data.grain_worker_count)};
  if (from_arrays(c)) return {from_reference_caches(c, folder, where, batches, task)};
  const ImageConfig images = picture_config(c, folder);
  task.masked = images.mask != MaskFrom::none;
  task.sizes = images.sizes;
  task.caption_dropout = c.data.caption_dropout;
  if (!c.loss.cache_latents_text_encoder_outputs)
    return encoded_in_step(c, folder, open_source(where), images, batches, task, constants);
  return encoded_before(c, devices, folder, companions, open_source(where), images, batches, constants);
}

}  // namespace md
