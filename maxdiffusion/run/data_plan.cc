#include "maxdiffusion/run/data_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/folders/dataset_file.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/storage/hub_cache.h"
#include "maxdiffusion/storage/location.h"

namespace md {
namespace {

/// Whether a key other than dataset_name sets the location of the records.
bool is_elsewhere(const DataSourceConfig& s) {
  return !(s.dataset_config + s.hf_train_files + s.grain_train_files + s.train_data_dir + s.hf_data_dir).empty() ||
         s.dataset_type == "synthetic";
}

/// Checks the model's size against the key that states it.
void compare_size(const char* key, const std::optional<int64_t>& configured, int64_t size) {
  check(!configured || *configured == size, Code::invalid_config, "{} is {}; expected {}, this model's", key,
        configured.value_or(0), size);
}

/// "12 records, 0123…": the number of records, or of shards, and a hash of the names and captions of all, or of the
/// names and sizes of their files, and of the contents of some.
std::string contents_of(const RecordSource& source) {
  constexpr int64_t kMost = 16;
  const DataIdentity identity = source.identity();
  std::string all = fmt::format("{} {} {}\n", identity.names, identity.captions, identity.files);
  const auto add = [&all](const Record& r) {
    const auto add_bytes = [&all](const Blob& b) { all += content_hash(b.bytes); };
    all += r.caption;
    add_bytes(r.image);
    add_bytes(r.mask);
    for (const Blob& frame : r.frames) add_bytes(frame);
    for (const Blob& reference : r.references) add_bytes(reference);
    const auto add_array = [&all](const HostArray& a) {
      all += content_hash({reinterpret_cast<const char*>(a.data()), a.bytes()});
    };
    if (r.pixels) add_array(r.pixels);
    for (const auto& [name, a] : r.arrays) {
      all += name;
      add_array(a);
    }
  };
  const bool sharded = source.shards() > 0;
  const int64_t n = sharded ? source.shards() : source.size(), read = std::min(n, kMost);
  for (int64_t i = 0; i < read; ++i) {
    const int64_t at = i * n / read;
    if (!sharded)
      add(source.read(at));
    else if (const auto next = source.open(at, 0)->next())
      add((*next)());
  }
  return fmt::format("{} {}, {}", n, sharded ? "shards" : "records", content_hash(all));
}

}  // namespace

FolderImages usual_folder(const ImageKeys& k) {
  return {.size = {k.resolution, k.resolution},
          .enable_bucket = k.enable_bucket,
          .bucket_no_upscale = k.bucket_no_upscale,
          .random_crop = k.random_crop,
          .random_flip = k.random_flip,
          .min_bucket_reso = k.min_bucket_reso,
          .max_bucket_reso = k.max_bucket_reso,
          .bucket_reso_steps = k.bucket_reso_steps,
          .frames = k.frame_buckets,
          .alpha_mask = k.alpha_mask,
          .unmasked_weight = k.unmasked_weight};
}

SourcePlan plan_source(const DataKeys& keys, DataMode mode) {
  if (mode == DataMode::dreambooth)
    return {.config = {.dataset_type = "image_folder",
                       .train_data_dir = keys.dreambooth.instance_data_dir,
                       .follow_links = keys.source.follow_links,
                       .captions = false}};  // the prompts are
  SourcePlan plan{.config = keys.source};
  DataSourceConfig& s = plan.config;
  s.resolution = keys.images.resolution;
  if (!s.dataset_config.empty()) {
    DatasetFile file = read_dataset_file(s.dataset_config, s.reg_data_dir, usual_folder(keys.images));
    s.folders_name = std::move(file.name);
    s.folders = std::move(file.folders);
    plan.batch_sizes = std::move(file.batch_sizes);
  }
  if (const InversionKeys& k = keys.inversion; !k.placeholder_token.empty() && k.learnable_property != "captions") {
    s.folders_name = "textual inversion";
    s.folders = {{.where = "train_data_dir",
                  .folder = s.train_data_dir,
                  .only_caption = fmt::format(
                      "{{{}}}", fmt::join(inversion_captions(k.learnable_property, k.placeholder_token), "|")),
                  .repeats = k.repeats,
                  .captions = {.wildcards = true},
                  .images = usual_folder(keys.images)}};
  }
  plan.emoji_move = s.dataset_name == "moving-emoji";
  if (is_elsewhere(s) || (s.dataset_name != "noto-emoji" && !plan.emoji_move)) return plan;
  const std::string& place = keys.batches.dataset_save_location;
  MovingEmojiConfig& e = plan.emoji.emplace();
  e.emoji.resolution = plan.emoji_move ? keys.sample.height.value_or(s.resolution) : s.resolution;
  e.num_frames = keys.sample.num_frames.value_or(17);
  e.fps = keys.sample.fps;
  if (place.empty()) return plan;  // rejected when the data is rendered
  s.dataset_name = plan.emoji_move
                       ? fmt::format("{}/moving-emoji-{}-{}-{}", place, e.emoji.resolution, e.num_frames, e.fps)
                       : fmt::format("{}/noto-emoji-{}", place, s.resolution);
  return plan;
}

DataSourceConfig prepare_source(const SourcePlan& plan) {
  DataSourceConfig s = plan.config;
  if (!plan.emoji) {
    if (!is_elsewhere(s) && !s.dataset_name.empty() && !is_remote(s.dataset_name))
      s.dataset_name = local_folder(s.dataset_name, "", "datasets");
    return s;
  }
  check(s.dataset_name.find('/') != std::string::npos, Code::invalid_config,
        "dataset_save_location is empty; expected a folder for dataset_name={}", s.dataset_name);
  processes().coordinator_first("emoji", [&] {
    if (exists(s.dataset_name + "/metadata.jsonl")) return;
    log_info("rendering the emoji into {}", s.dataset_name);
    if (plan.emoji_move)
      prepare_moving_emoji(s.dataset_name, *plan.emoji);
    else
      log_info("{} images", prepare_emoji(s.dataset_name, plan.emoji->emoji));
  });
  return s;
}

DataPlan plan_data(const DataKeys& keys, DataMode mode, const RunInfo& run, const Family& family) {
  const std::string& saved =
      keys.batches.dataset_save_location.empty() ? run.place : keys.batches.dataset_save_location;
  DataPlan plan{.mode = mode,
                .replay = keys.denoise.replay_batches,
                .cache = {.folder = saved.empty() ? "" : below(saved, "cache"), .run = run.place},
                .shuffle = keys.batches.enable_data_shuffling,
                .workers = static_cast<int>(keys.batches.grain_worker_count)};
  if (mode == DataMode::replay) return plan;
  plan.source = plan_source(keys, mode);
  if (mode == DataMode::dreambooth) {
    check_size(keys.sample, family, training_size(keys.sample, keys.images.resolution, family));
    plan.images = {.resolution = keys.images.resolution, .center_crop = keys.images.center_crop};
    plan.dreambooth = {keys.dreambooth.class_data_dir, keys.dreambooth.instance_prompt, keys.dreambooth.class_prompt};
    return plan;
  }
  if (mode == DataMode::encoded_records)
    plan.source.config.array_columns =
        record_columns(family.spec(), std::ssize(plan.source.config.reference_columns()));
  else if (mode != DataMode::synthetic_latents)
    plan.images = plan_images(keys, family);
  if (plan.images.clip) plan.source.config.synthetic_frames = plan.images.clip->frames;
  const double per_device = keys.batches.per_device_batch_size;
  for (int64_t size : plan.source.batch_sizes)
    if (static_cast<double>(size) != per_device)
      log_warning("{}: batch_size={} is ignored: batches have the run's per_device_batch_size={}",
                  plan.source.config.dataset_config, size, per_device);
  if (const std::vector<DataFolder>& folders = plan.source.config.folders; !folders.empty())
    plan.images = plan_folders(plan.images, folders, keys, &family);
  return plan;
}

namespace {

/// The buckets of one folder's images or clips.
AspectBuckets buckets_of(const FolderImages& f, const std::vector<int64_t>& frames, const Family* family) {
  if (f.enable_bucket) {
    check(!family || f.bucket_reso_steps % family->spec().size_multiple() == 0, Code::invalid_config,
          "bucket_reso_steps is {}; expected a multiple of {}, the downscale of this autoencoder and UNet",
          f.bucket_reso_steps, family ? family->spec().size_multiple() : 0);
    return AspectBuckets({.min_bucket_reso = f.min_bucket_reso,
                          .max_bucket_reso = f.max_bucket_reso,
                          .bucket_reso_steps = f.bucket_reso_steps,
                          .bucket_no_upscale = f.bucket_no_upscale,
                          .frames = frames,
                          .area = f.size.width * f.size.height});
  }
  std::vector<ImageSize> sizes;
  for (int64_t n : frames) {
    if (family) family->latent_dims({f.size.height, f.size.width, n});
    sizes.push_back({f.size.height, f.size.width, n});
  }
  return AspectBuckets::of(sizes);
}

}  // namespace

namespace {

/// Checks the number of a folder's reference images; `first`: of the first folder.
void check_references(const DataFolder& f, int64_t first, const DataKeys& keys, const Family* family) {
  const int64_t n = f.reference_images();
  check(n == first, Code::invalid_config, "{}: {} control images for each image; expected {}, as in the first folder",
        f.where, n, first);
  if (!family) return;
  const ReferenceImages* references = family->reference_images();
  check(n == 0 || references, Code::invalid_config,
        "{}: control images; expected none: this model takes no reference images", f.where);
  if (!references) return;
  check(n >= references->min_images && n <= references->max_images, Code::invalid_config,
        "{}: {} control images for each image; expected {} to {}", f.where, n, references->min_images,
        references->max_images);
  check(n == 0 || !keys.denoise.train_text_encoder, Code::invalid_config,
        "{}: control images cannot be combined with train_text_encoder: they are encoded once, with the texts",
        f.where);
  check(
      n == 0 || family->seen({{64, 64}}).tokens == 0 || (keys.denoise.caption_dropout == 0 && f.captions.dropout == 0),
      Code::invalid_config,
      "{}: captions are dropped; expected caption_dropout 0: this model's texts hold reference images, without which "
      "none is encoded",
      f.where);
}

}  // namespace

ImageConfig plan_folders(ImageConfig images, const std::vector<DataFolder>& folders, const DataKeys& keys,
                         const Family* family) {
  images.buckets.reset();
  images.center_crop = images.random_crop = images.random_flip = false;
  images.sizes = family && !family->spec().size_conditioning.empty();
  images.references = folders.at(0).reference_images();
  std::vector<ImageConfig> all;
  bool weighs = false;
  for (const DataFolder& f : folders) {
    check(!family || !f.clips || family->spec().videos(), Code::invalid_config,
          "{}: videos; expected images, which this model generates", f.where);
    check_references(f, images.references, keys, family);
    ImageConfig c = images;
    c.resolution = std::max(f.images.size.width, f.images.size.height);
    c.random_crop = f.images.random_crop, c.random_flip = f.images.random_flip;
    c.mask = !f.masks.empty() ? MaskFrom::record : f.images.alpha_mask ? MaskFrom::alpha : MaskFrom::none;
    c.unmasked_weight = f.images.unmasked_weight;
    c.loss_weight = f.loss_weight * (f.regularization ? keys.dreambooth.prior_loss_weight : 1);
    c.least_area = f.images.least_area, c.least_side = f.images.least_side;
    c.least_aspect = f.images.least_aspect, c.greatest_aspect = f.images.greatest_aspect;
    c.captions = f.captions;
    std::vector<int64_t> frames = f.images.frames;
    if (!f.clips) frames = {1};  // an image is a video of one frame
    if (frames.empty()) frames = {images.clip ? images.clip->frames : 1};
    if (c.clip) c.clip->start = f.images.start;
    try {
      c.buckets = buckets_of(f.images, frames, family);
    } catch (Error& e) {
      throw e.note("in " + f.where);
    }
    weighs |= c.mask != MaskFrom::none || c.loss_weight != 1;
    images.random_crop |= c.random_crop, images.random_flip |= c.random_flip;
    all.push_back(std::move(c));
  }
  images.mask = weighs ? MaskFrom::whole : MaskFrom::none;
  for (ImageConfig& c : all)
    if (weighs && c.mask == MaskFrom::none) c.mask = MaskFrom::whole;
  images.folders = std::move(all);
  return images;
}

ImageConfig plan_images(const DataKeys& keys, const Family& family) {
  const ImageKeys& k = keys.images;
  ImageConfig p{.resolution = k.resolution,
                .center_crop = k.center_crop,
                .random_crop = k.random_crop,
                .random_flip = k.random_flip,
                .mask = k.alpha_mask               ? MaskFrom::alpha
                        : keys.denoise.masked_loss ? MaskFrom::record
                                                   : MaskFrom::none,
                .mask_downscale = family.spec().autoencoder->downscale,
                .sizes = !family.spec().size_conditioning.empty() && (k.enable_bucket || k.original_size_conditioning),
                .references = std::ssize(keys.source.reference_columns()),
                .unmasked_weight = k.unmasked_weight};
  std::set<int64_t> frames = {1};
  if (family.spec().videos()) {
    const MediaSize size = training_size(keys.sample, keys.images.resolution, family);
    check_size(keys.sample, family, size);
    frames = {size.frames};
    p.clip.emplace(ClipConfig{.frames = size.frames, .fps = keys.sample.fps});
    if (!k.frame_buckets.empty()) frames = std::set(k.frame_buckets.begin(), k.frame_buckets.end());
    std::vector<ImageSize> sizes;
    for (int64_t f : frames) {
      try {
        family.latent_dims({size.height, size.width, f});
      } catch (Error& e) {
        e.note(fmt::format("in frame_buckets: {}", f));
        throw;
      }
      sizes.push_back({size.height, size.width, f});
    }
    if (!k.enable_bucket) p.buckets = AspectBuckets::of(sizes);
  }
  if (!k.enable_bucket) {
    if (!p.buckets) check_size(keys.sample, family, training_size(keys.sample, keys.images.resolution, family));
    return p;
  }
  check(k.bucket_reso_steps % family.spec().size_multiple() == 0, Code::invalid_config,
        "bucket_reso_steps is {}; expected a multiple of {}, the downscale of this autoencoder and UNet",
        k.bucket_reso_steps, family.spec().size_multiple());
  if (k.bucket_no_upscale) log_info_once("min_bucket_reso, max_bucket_reso are ignored: bucket_no_upscale=true");
  try {
    p.buckets.emplace(AspectBucketConfig{k.resolution,
                                         k.min_bucket_reso,
                                         k.max_bucket_reso,
                                         k.bucket_reso_steps,
                                         k.bucket_no_upscale,
                                         {frames.begin(), frames.end()}});
  } catch (Error& e) {
    throw e.note("with enable_bucket=true");
  }
  return p;
}

void plan_synthetic(const DataKeys& keys, const RunInfo& run, DenoiseTask& task, DataSourceConfig& source) {
  const SyntheticKeys& k = keys.synthetic;
  check(task.caption_dropout == 0 && !task.masked && !task.sizes && keys.images.frame_buckets.empty(),
        Code::invalid_config,
        "dataset_type is synthetic: its encoded samples have no masks, no sizes and no empty caption; expected none of "
        "caption_dropout, masked_loss, alpha_mask, enable_bucket, frame_buckets, original_size_conditioning");
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
  source.synthetic_seed = run.seed;
  source.synthetic_arrays["latents"] = {DType::f32, latent};
  std::optional<int64_t> length;
  const std::vector<MediaSize> references(static_cast<size_t>(task.references), task.size);
  for (Field f : task.family->spec().conditioning) {
    if (f.shape.rank() == 2 && !length) {
      length = f.shape.dims[0] = k.synthetic_override_max_sequence_length.value_or(f.shape.dims[0]);
      compare_size("synthetic_override_text_embed_dim", k.synthetic_override_text_embed_dim, f.shape.dims[1]);
      *length += FamilySpec::rows_of_images(task.family->seen(references).tokens);
      f.shape.dims[0] = *length;
      task.text = embeddings_input(*length);
    }
    source.synthetic_arrays[f.name] = f.shape;
  }
  for (size_t i = 0; i < references.size(); ++i)
    source.synthetic_arrays[ReferenceImages::field(i)] = {DType::f32, latent};
  if (task.images)
    for (const Field& f : task.family->image_conditioning()->fields(task.size))
      source.synthetic_arrays[f.name] = f.shape;
}

void check_same_data(const DataPlan& plan) {
  Processes& all = processes();
  if (all.alone() || plan.mode == DataMode::replay) return;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.source));
  const auto equal = [](const std::vector<std::string>& found) {
    return std::ranges::all_of(found, [&](const std::string& one) { return one == found[0]; });
  };
  if (equal(all.gather("data", source->fingerprint()))) return;
  // Each host may have its own copy, with other paths and times.
  const std::vector<std::string> found = all.gather("records", contents_of(*source));
  std::optional<Error> other;
  for (size_t rank = 1; rank < found.size() && !other; ++rank)
    if (found[rank] != found[0]) {
      other.emplace(
          Code::invalid_config,
          fmt::format("the data of process {} is {}; expected the data of process 0, {}", rank, found[rank], found[0]));
      other->note("try: one folder of a shared file system, or the same files on every host");
    }
  throw_together(all, "compared data", other);
}

}  // namespace md
