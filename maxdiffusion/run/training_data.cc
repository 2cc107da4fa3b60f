#include "maxdiffusion/run/training_data.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/demo/emoji.h"
#include "maxdiffusion/data/demo/moving_emoji.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/train_autoencoder.h"
#include "maxdiffusion/storage/hub_cache.h"
#include "maxdiffusion/storage/mirror.h"
#include "maxdiffusion/storage/staging.h"
#include "maxdiffusion/storage/write.h"
#include "maxdiffusion/tasks/replay.h"

namespace md {
namespace {

/// Scales the moments of a batch for the denoiser.
Batch scaled(const Family& family, Batch batch) {
  for (auto& [name, a] : batch)
    if (name.ends_with("moments")) a = family.spec().autoencoder->latent_scale.apply_to_moments(a);
  return batch;
}
std::unique_ptr<Dataset> scaled(const std::shared_ptr<const Family>& family, std::unique_ptr<Dataset> batches) {
  return mapped(std::move(batches), [family](Batch b) { return scaled(*family, std::move(b)); });
}

CachedText text_of(const DenoiseTask& task) {
  return task.text->tokens() ? CachedText::tokens : CachedText::embeddings;
}

/// The arrays' only row without its axis, with a prefix.
HostArrays constants_of(const HostArrays& one_caption) {
  HostArrays out;
  for (const auto& [name, a] : one_caption) out["empty_" + name] = without_batch(a);
  return out;
}

BatchConfig batch_config(const RunModels& models, int64_t update) {
  const RunConfig& c = models.config();
  return {.stream = {.seed = models.run().seed,
                     .shuffle = c.batches.enable_data_shuffling,
                     .share = share_of_update(models.devices(), update, c.update.gradient_accumulation_steps)},
          .batch = update,
          .workers = static_cast<int>(c.batches.grain_worker_count)};
}

/// Pictures of the subject and of its class, pair by pair; the shorter set begins again until both are as long.
class Pairs final : public Samples {
 public:
  Pairs(std::shared_ptr<const Samples> instances, std::shared_ptr<const Samples> classes)
      : instances_(std::move(instances)), classes_(std::move(classes)) {}
  int64_t size() const override { return std::max(instances_->size(), classes_->size()); }
  HostArrays read(const DrawnSample& which) const override {
    HostArrays out = instances_->read({which.index % instances_->size(), which.bits});
    for (const auto& [name, a] : classes_->read({which.index % classes_->size(), which.bits}))
      out.emplace("class_" + name, a);
    return out;
  }

 private:
  std::shared_ptr<const Samples> instances_, classes_;
};

ImageConfig dreambooth_images(const RunConfig& c) {
  return {.resolution = c.images.resolution, .center_crop = c.images.center_crop};
}

void open_dreambooth(RunModels& models, TrainingData& data) {
  const RunConfig& c = models.config();
  const DreamboothKeys& k = c.dreambooth;
  const ImageConfig images = dreambooth_images(c);
  auto load = [&](const std::string& folder, const std::string& caption) {
    const auto source = open_source({.dataset_type = "image_folder", .train_data_dir = folder});
    return cached_samples(encode_dataset(models, source, images, text_of(data.task), &caption).buckets[0], images);
  };
  const auto instances = load(k.instance_data_dir, k.instance_prompt), classes = load(k.class_data_dir, k.class_prompt);
  log_info("DreamBooth: {} pictures of the subject, {} of its class", instances->size(), classes->size());
  const BatchConfig batches = batch_config(models, data.update_size(c.update));
  data.batches =
      scaled(models.family(), sample_batches(std::make_shared<Pairs>(instances, classes), batches.batch,
                                             batches.stream.seed, batches.stream.shuffle, batches.stream.share));
}

/// The batches of a recorded run.
void open_recorded(const RunModels& models, TrainingData& data) {
  const RunConfig& c = models.config();
  DenoiseTask& task = data.task;
  const std::string& file = c.denoise.replay_batches;
  const int64_t accumulation = c.update.gradient_accumulation_steps;
  Replay replay = open_replay(file, *task.family, task.process);
  check(c.optim.max_train_steps <= replay.steps, Code::invalid_config,
        "max_train_steps is {}, replay_batches '{}' holds {} steps", c.optim.max_train_steps, file, replay.steps);
  check(replay.batch_size % accumulation == 0, Code::invalid_config,
        "replay_batches '{}' holds {} pictures a step, which {} gradient_accumulation_steps do not divide", file,
        replay.batch_size, accumulation);
  task.media = latents_input();
  task.text = embeddings_input(replay.text_length);
  task.noise = recorded_noise_input();
  task.sizes = true;
  task.batch_size = part_of_replica(replay.batch_size / accumulation, data.replicas);
  task.size = task.family->spec().autoencoder->media_size(replay.latent);
  data.batches = std::move(replay.data);
  if (data.replicas == 1) return;
  const BatchShare share = share_of_update(models.devices(), replay.batch_size, accumulation);
  data.batches = mapped(std::move(data.batches), [mine = share.rows(replay.batch_size)](const Batch& whole) {
    Batch part;
    for (const auto& [name, a] : whole)
      for (size_t i = 0; i < mine.size(); ++i)
        add_rows(part[name], std::ssize(mine), static_cast<int64_t>(i), rows(a, mine[i], 1));
    return part;
  });
}

/// Latents and embeddings that another program computed.
void open_encoded_records(const RunModels& models, TrainingData& data) {
  const RunConfig& c = models.config();
  DenoiseTask& task = data.task;
  DataSourceConfig where = source_config(c);
  where.array_columns = task.family->spec().records->columns(task.family->spec());
  data.batches = mapped(
      array_batches(open_source(where), batch_config(models, data.update_size(models.config().update))),
      [family = task.family](const Batch& b) { return family->spec().records->from_records(family->spec(), b); });
  const Batch first = data.batches->next();
  data.batches->seek({});
  const bool drawn = first.contains("latents");
  if (drawn) task.media = latents_input();
  Dims latent = first.at(drawn ? "latents" : "moments").dims();
  latent.erase(latent.begin());
  if (!drawn) latent.back() /= 2;
  task.size = task.family->spec().autoencoder->media_size(latent);
  const std::vector<Field> fields = task.family->spec().conditioning;
  if (!fields.empty() && fields[0].shape.rank() == 2) task.text = embeddings_input(first.at(fields[0].name).dims()[1]);
}

/// Whether data are encoded samples that nobody made: where a key gives their sizes, and where the model makes videos.
bool makes_samples(const RunConfig& c, const DenoiseTask& task) {
  if (c.source.dataset_type != "synthetic" || !c.denoise.cache_latents_text_encoder_outputs) return false;
  SyntheticKeys keys = c.synthetic;
  bool given = false;
  keys.visit([&](const char*, const std::optional<int64_t>& value, const char*) { given |= value.has_value(); });
  return given || task.family->latent_dims(task.size).size() > 3;
}

/// Checks a size of the model against the key that says what it should be.
void compare_size(const char* key, const std::optional<int64_t>& said, int64_t size) {
  check(!said || *said == size, Code::invalid_config, "{} is {}, but this model's is {}", key, said.value_or(0), size);
}

/// Random latents and embeddings, for trials without data.
void open_made_samples(const RunModels& models, TrainingData& data) {
  const RunConfig& c = models.config();
  const SyntheticKeys& k = c.synthetic;
  DenoiseTask& task = data.task;
  check(
      task.caption_dropout == 0 && !task.masked && !task.sizes && c.images.frame_buckets.empty(), Code::invalid_config,
      "dataset_type synthetic makes encoded samples here, which have no masks, no sizes and no empty caption; try "
      "without caption_dropout, masked_loss, alpha_mask, enable_bucket, frame_buckets and original_size_conditioning");
  task.size = {k.synthetic_override_height.value_or(task.size.height),
               k.synthetic_override_width.value_or(task.size.width),
               k.synthetic_override_num_frames.value_or(task.size.frames)};
  task.conditioning_size = task.size;
  task.media = latents_input();
  const Dims latent = task.family->latent_dims(task.size);
  const size_t rows = latent.size() - 3;
  compare_size("synthetic_override_num_channels_latents", k.synthetic_override_num_channels_latents, latent.back());
  compare_size("synthetic_override_vae_scale_factor_spatial", k.synthetic_override_vae_scale_factor_spatial,
               task.size.height / latent[rows]);
  if (rows > 0 && latent[0] > 1)
    compare_size("synthetic_override_vae_scale_factor_temporal", k.synthetic_override_vae_scale_factor_temporal,
                 (task.size.frames - 1) / (latent[0] - 1));
  DataSourceConfig where = source_config(c);
  where.synthetic_seed = models.run().seed;
  where.synthetic_arrays["latents"] = {DType::f32, latent};
  std::optional<int64_t> length;
  for (Field f : task.family->spec().conditioning) {
    if (f.shape.rank() == 2 && !length) {
      length = f.shape.dims[0] = k.synthetic_override_max_sequence_length.value_or(f.shape.dims[0]);
      compare_size("synthetic_override_text_embed_dim", k.synthetic_override_text_embed_dim, f.shape.dims[1]);
      task.text = embeddings_input(*length);
    }
    where.synthetic_arrays[f.name] = f.shape;
  }
  if (task.images)
    for (const Field& f : task.family->image_conditioning()->fields(task.size))
      where.synthetic_arrays[f.name] = f.shape;
  log_info("{} Synthetic Data Iterator Configuration:", models.folder().pipeline());
  log_info("  samples: {}", where.synthetic_num_samples ? std::to_string(*where.synthetic_num_samples) : "without end");
  log_info("  height {}, width {}, frames {}", task.size.height, task.size.width, task.size.frames);
  for (const auto& [name, shape] : where.synthetic_arrays)
    log_info("  {}: {}", name, to_string(batched(task.batch_size, shape)));
  data.batches = array_batches(open_source(where), batch_config(models, data.update_size(c.update)));
}

/// Images as they are read, and token ids.
void open_images(const RunModels& models, const std::shared_ptr<const RecordSource>& source, const ImageConfig& images,
                 TrainingData& data) {
  auto tokens = [family = data.task.family](const std::vector<std::string>& captions) {
    return family->tokenize(captions);
  };
  data.constants = constants_of(tokens({""}));
  const BatchConfig batches = batch_config(models, data.update_size(models.config().update));
  if (!images.buckets) {
    data.batches = image_batches(source, images, batches, tokens);
    return;
  }
  ImagesInBuckets sorted = sort_into_aspect_buckets(source, images);
  std::vector<int64_t> counts;
  counts.reserve(sorted.records.size());
  for (const auto& records : sorted.records) counts.push_back(static_cast<int64_t>(records.size()));
  data.buckets = sorted.sizes;
  log_aspect_buckets(sorted.sizes, counts, batches.batch);
  data.batches = image_batches(std::move(sorted), images, batches, tokens);
}

/// The subject's pictures as they are read.
void look_at_dreambooth(const RunModels& models, TrainingData& data) {
  const DreamboothKeys& k = models.config().dreambooth;
  const auto source = open_source({.dataset_type = "image_folder", .train_data_dir = k.instance_data_dir});
  open_images(models, source, dreambooth_images(models.config()), data);
}

/// Images encoded beforehand, by an autoencoder that is trained first where a key asks for it.
void open_encoded_images(RunModels& models, const std::shared_ptr<const RecordSource>& source,
                         const ImageConfig& images, TrainingData& data) {
  const RunConfig& c = models.config();
  if (c.model.train_new_vae)
    train_autoencoder(models, cached_samples(cache_pixels(models, source, images).buckets[0], {}));
  const CachedImages encoded = encode_dataset(models, source, images);
  log_info("{} {}, {} skipped", encoded.size(), images.clip ? "clips" : "pictures", encoded.skipped);
  if (c.model.train_new_vae) {
    models.fit_autoencoder([&](const auto& take) { encoded.buckets[0]->each_part("moments", take); });
    data.task.family = models.family();
  }
  if (c.denoise.caption_dropout > 0) data.constants = constants_of(models.text_encoder().encode({""}));
  const BatchConfig batches = batch_config(models, data.update_size(c.update));
  std::vector<std::shared_ptr<const Samples>> samples;
  std::vector<int64_t> counts;
  for (const auto& bucket : encoded.buckets) {
    samples.push_back(cached_samples(bucket, images));
    counts.push_back(bucket->size());
  }
  if (images.buckets) {
    data.buckets = encoded.sizes;
    log_aspect_buckets(data.buckets, counts, batches.batch);
    data.batches = samples_in_aspect_buckets(std::move(samples), batches.batch, batches.stream);
  } else {
    data.batches =
        sample_batches(samples[0], batches.batch, batches.stream.seed, batches.stream.shuffle, batches.stream.share);
  }
  data.batches = scaled(models.family(), std::move(data.batches));
}

}  // namespace

ImageConfig image_config(const RunConfig& c, const Family& family) {
  const ImageKeys& k = c.images;
  ImageConfig p{.resolution = k.resolution,
                .center_crop = k.center_crop,
                .random_crop = k.random_crop,
                .random_flip = k.random_flip,
                .mask = k.alpha_mask            ? MaskFrom::alpha
                        : c.denoise.masked_loss ? MaskFrom::record
                                                : MaskFrom::none,
                .mask_downscale = family.spec().autoencoder->downscale,
                .sizes = !family.spec().size_conditioning.empty() && (k.enable_bucket || k.original_size_conditioning)};
  std::set<int64_t> frames = {1};
  if (family.spec().videos()) {
    const MediaSize size = training_size(c, family);
    check_size(c.sample, family, size);
    frames = {size.frames};
    p.clip.emplace(ClipConfig{.frames = size.frames, .fps = c.sample.fps});
    if (!k.frame_buckets.empty()) frames = std::set(k.frame_buckets.begin(), k.frame_buckets.end());
    std::vector<ImageSize> sizes;
    for (int64_t f : frames) {
      try {
        family.latent_dims({size.height, size.width, f});
      } catch (Error& e) {
        e.note(fmt::format("{} is one of frame_buckets", f));
        throw;
      }
      sizes.push_back({size.height, size.width, f});
    }
    if (!k.enable_bucket) p.buckets = AspectBuckets::of(sizes);
  }
  if (!k.enable_bucket) {
    if (!p.buckets) check_size(c.sample, family, training_size(c, family));
    return p;
  }
  check(k.bucket_reso_steps % family.spec().size_multiple() == 0, Code::invalid_config,
        "bucket_reso_steps is {}; expected a multiple of {}, by which this autoencoder and UNet shrink a picture",
        k.bucket_reso_steps, family.spec().size_multiple());
  if (k.bucket_no_upscale) log_info_once("bucket_no_upscale: min_bucket_reso and max_bucket_reso do not count");
  try {
    p.buckets.emplace(AspectBucketConfig{k.resolution,
                                         k.min_bucket_reso,
                                         k.max_bucket_reso,
                                         k.bucket_reso_steps,
                                         k.bucket_no_upscale,
                                         {frames.begin(), frames.end()}});
  } catch (Error& e) {
    throw e.note("enable_bucket=true asks for buckets");
  }
  return p;
}

DataSourceConfig source_config(const RunConfig& c) {
  DataSourceConfig s = c.source;
  s.resolution = c.images.resolution;
  const bool elsewhere = !(s.hf_train_files + s.grain_train_files + s.train_data_dir + s.hf_data_dir).empty() ||
                         s.dataset_type == "synthetic";
  if (elsewhere || s.dataset_name.empty()) return s;
  const bool moving = s.dataset_name == "moving-emoji";
  if (s.dataset_name != "noto-emoji" && !moving) {
    if (!is_remote(s.dataset_name)) s.dataset_name = local_folder(s.dataset_name, "", "datasets");
    return s;
  }
  const std::string& place = c.batches.dataset_save_location;
  check(!place.empty(), Code::invalid_config, "dataset_name={} needs dataset_save_location", s.dataset_name);
  const MovingEmojiConfig clips{.emoji = {.resolution = c.sample.height.value_or(s.resolution)},
                                .num_frames = c.sample.num_frames.value_or(17),
                                .fps = c.sample.fps};
  s.dataset_name =
      moving ? fmt::format("{}/moving-emoji-{}-{}-{}", place, clips.emoji.resolution, clips.num_frames, clips.fps)
             : fmt::format("{}/noto-emoji-{}", place, s.resolution);
  processes().leader_first("emoji", [&] {
    if (exists(s.dataset_name + "/metadata.jsonl")) return;
    log_info("drawing the emoji into {}", s.dataset_name);
    if (moving)
      prepare_moving_emoji(s.dataset_name, clips);
    else
      log_info("{} pictures", prepare_emoji(s.dataset_name, {.resolution = s.resolution}));
  });
  return s;
}

TrainingData open_training_data(RunModels& models, bool encode) {
  const RunConfig& c = models.config();
  const Devices& devices = models.devices();
  TrainingData data{planned_task(c, models.family(), training_config(models.folder().scheduler_config(), c.scheduler),
                                 devices.count(), devices.replicas()),
                    nullptr};
  data.replicas = devices.replicas();
  const bool from_images = data.task.images && c.denoise.replay_batches.empty() && !makes_samples(c, data.task);
  check(!from_images || (c.denoise.cache_latents_text_encoder_outputs && !c.reads_encoded_records()),
        Code::invalid_config,
        "this model begins its media with images, which are taken from clips and encoded once; try: clips, with "
        "cache_latents_text_encoder_outputs=true, or replay_batches");
  if (!c.denoise.replay_batches.empty()) {
    open_recorded(models, data);
  } else if (c.is_dreambooth()) {
    encode ? open_dreambooth(models, data) : look_at_dreambooth(models, data);
  } else if (c.reads_encoded_records()) {
    open_encoded_records(models, data);
  } else if (makes_samples(c, data.task)) {
    open_made_samples(models, data);
  } else {
    const auto source = open_source(source_config(c));
    const ImageConfig images = image_config(c, *models.family());
    if (c.denoise.cache_latents_text_encoder_outputs && encode)
      open_encoded_images(models, source, images, data);
    else
      open_images(models, source, images, data);
  }
  return data;
}

std::vector<DenoiseTask> in_sizes(const RunConfig& c, const TrainingData& data) {
  std::vector<DenoiseTask> experts = of_experts(c, data.task);
  if (data.buckets.empty()) return experts;
  std::vector<DenoiseTask> tasks;
  for (const DenoiseTask& expert : experts)
    for (const ImageSize& size : data.buckets) {
      DenoiseTask& t = tasks.emplace_back(expert);
      t.size = {size.height, size.width, size.frames};
      t.one_of_several = data.buckets.size() > 1;
    }
  return tasks;
}

DataSourceConfig held_out_source(const RunConfig& c, const DenoiseTask& task) {
  const bool made = makes_samples(c, task), encoded = c.reads_encoded_records() || made;
  DataSourceConfig where{.dataset_type = encoded && !made ? c.source.dataset_type : "",
                         .train_data_dir = c.eval.eval_data_dir,
                         .train_split = c.source.train_split,
                         .image_column = c.source.image_column,
                         .caption_column = c.source.caption_column};
  if (encoded)
    where.array_columns = task.family->spec().records->columns(task.family->spec());
  else
    where.max_train_samples = c.eval.eval_max_number_of_samples_in_bucket;
  return where;
}

HeldOut held_out_samples(RunModels& models, const DenoiseTask& task) {
  const RunConfig& c = models.config();
  const std::shared_ptr<const Family> family = models.family();
  DataSourceConfig where = held_out_source(c, task);
  const std::string own_time = "timesteps";
  if (where.array_columns.empty()) {
    const bool crop = c.images.center_crop || c.images.random_crop;
    ImageConfig config{.resolution = c.images.resolution, .center_crop = crop};
    if (family->spec().videos()) {
      config = image_config(c, *family);
      config.random_flip = false;
      config.buckets = AspectBuckets::of({{task.size.height, task.size.width, task.size.frames}});
    }
    const auto samples =
        cached_samples(encode_dataset(models, open_source(where), config, text_of(task)).buckets.front(), config);
    HeldOut held;
    held.count = samples->size();
    held.read = [samples, family](int64_t i) { return scaled(*family, batch_of(*samples, {{.index = i, .bits = 0}})); };
    return held;
  }
  where.array_columns.push_back(own_time + "|");
  const std::shared_ptr<const RecordSource> source = open_source(where);
  HeldOut held;
  std::vector<std::pair<int64_t, int64_t>> places;  // shard and offset of each record that is read in shards
  std::map<std::string, Shape> first;
  auto add = [&](const Record& r) {
    for (const auto& [name, a] : r.arrays) {
      const Shape& shape = first.try_emplace(name, a.shape()).first->second;
      check(a.shape() == shape, Code::io, "{}: '{}' is {}, unlike that of the records before, {}", r.name, name,
            to_string(a.shape()), to_string(shape));
    }
    const auto time = r.arrays.find(own_time);
    const bool has_time = time != r.arrays.end();
    check(held.count == 0 || has_time != held.timesteps.empty(), Code::io,
          "{}: some records of '{}' have '{}' and some have not", r.name, c.eval.eval_data_dir, own_time);
    ++held.count;
    if (!has_time) return;
    check(time->second.shape().elements() == 1, Code::io, "{}: '{}' is {}, expected one number", r.name, own_time,
          to_string(time->second.shape()));
    held.timesteps.push_back(static_cast<int64_t>(time->second.to_doubles()[0]));
  };
  // Without times of their own, the first are measured at every time; the others are not looked at.
  auto enough = [&] { return held.timesteps.empty() && held.count >= c.eval.eval_max_number_of_samples_in_bucket; };
  for (int64_t i = 0; source->shards() == 0 && i < source->size() && !enough(); ++i) add(source->read(i));
  for (int64_t shard = 0; shard < source->shards() && !enough(); ++shard) {
    const std::unique_ptr<ShardReader> reader = source->open(shard, 0);
    for (int64_t at = reader->offset(); !enough(); at = reader->offset()) {
      const std::optional<PendingRecord> next = reader->next();
      if (!next) break;
      add((*next)());
      places.emplace_back(shard, at);
    }
  }
  held.read = [source, family, own_time, places = std::move(places)](int64_t i) {
    auto in_shard = [&](const std::pair<int64_t, int64_t>& at) {
      return (*source->open(at.first, at.second)->next())();
    };
    Record r = places.empty() ? source->read(i) : in_shard(places.at(static_cast<size_t>(i)));
    r.arrays.erase(own_time);
    HostArrays one;
    for (const auto& [name, a] : r.arrays) one[name] = a.reshaped(batched(1, a.shape()).dims);
    return family->spec().records->from_records(family->spec(), one);
  };
  return held;
}

}  // namespace md
