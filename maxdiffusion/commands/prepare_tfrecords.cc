#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/data/images/load_images.h"
#include "maxdiffusion/data/records/tfrecord_writer.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/ops/random.h"
#include "maxdiffusion/run/data_plan.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/model_components.h"
#include "maxdiffusion/storage/local_cache.h"
#include "maxdiffusion/storage/remote_sync.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// Row i of every array, without axis 0.
HostArrays row_of(const HostArrays& all, int64_t i) {
  HostArrays out;
  for (const auto& [name, a] : all) out[name] = md::row_of(a, i);
  return out;
}

/// Writes images as stored.
void write_stored(const std::shared_ptr<const RecordSource>& source, const DataSourceConfig& keys,
                  TfrecordShards& shards) {
  RecordStream stream(source, {.shuffle = false});
  for (auto n = stream.next(); n.epoch == 0; n = stream.next()) {
    const Record r = n.read();
    if (!r.fault.empty()) {
      log_warning("skipped {}", r.fault);
      continue;
    }
    shards.add({{keys.image_column, r.pixels ? encode_png(r.pixels) : std::string(r.image.bytes)},
                {keys.caption_column, r.caption}});
  }
}

/// Integer features of a record, in addition to its arrays.
std::map<std::string, int64_t> numbers_of(const TrainingRequest& r, int64_t record) {
  if (!r.data.tfrecords.enable_eval_timesteps) return {};
  const std::vector<int64_t>& all = r.learning.eval.timesteps_list;
  return {{"timesteps",
           all[static_cast<size_t>(record * static_cast<int64_t>(all.size()) / r.data.tfrecords.num_eval_samples)]}};
}

/// The images or clips to write.
std::shared_ptr<const RecordSource> open_data(const TrainingRequest& r, const SourcePlan& from) {
  const TfrecordKeys& keys = r.data.tfrecords;
  auto source = open_source(prepare_source(from));
  return keys.enable_eval_timesteps ? first_records(source, keys.num_eval_samples) : source;
}

void write_encoded(const TrainingRequest& r, SourcePlan from, TfrecordShards& shards) {
  ModelComponents models(r.components);
  r.rules.warn_of_ignored(models.opened(), "prepare_tfrecords");
  const ImageKeys& keys = r.data.images;
  const Family& family = *models.family();
  const HostRng rng(r.run.seed, "prepared posterior");
  const auto noise = [&](size_t n) {
    std::vector<float> random(n);
    rng.fill(HostRng::Distribution::normal, 1, static_cast<uint64_t>(shards.count()) * n, random);
    return random;
  };
  const int64_t references = std::ssize(r.data.source.reference_columns());
  ImageConfig config{.resolution = keys.resolution,
                     .center_crop = keys.center_crop,
                     .random_crop = keys.random_crop,
                     .references = references};
  if (family.spec().videos()) config = plan_images(r.data, family);
  if (config.clip) from.config.synthetic_frames = config.clip->frames;
  const auto source = open_data(r, from);
  const ImagesInBuckets images = sort_into_aspect_buckets(source, config, true);
  int64_t skipped = 0;
  std::string first;
  for (size_t bucket = 0; bucket < images.sizes.size(); ++bucket) {
    const std::vector<int64_t>& records = images.records[bucket];
    for (int64_t from = 0; from < std::ssize(records); from += models.encoder_batch()) {
      const auto end = std::min(from + models.encoder_batch(), static_cast<int64_t>(std::ssize(records)));
      const LoadedImages group = load_images(*images.source, {records.begin() + from, records.begin() + end}, config);
      skipped += std::ssize(group.skipped);
      if (first.empty() && skipped > 0) first = group.skipped[0];
      if (group.names.empty()) continue;
      struct Pass {
        HostArray moments;
        HostArrays conditioning;
      };
      std::vector<Pass> passes;
      for (const bool flip : keys.random_flip ? std::vector{false, true} : std::vector{false}) {
        std::vector<HostArray> from_images = group.references;
        if (flip) std::ranges::transform(from_images, from_images.begin(), mirrored);
        Pass& pass = passes.emplace_back();
        pass.moments = models.media_autoencoder().encode(flip ? mirrored(group.pixels) : group.pixels);
        // Without reference images mirrored samples have the same texts.
        pass.conditioning = flip && references == 0
                                ? passes[0].conditioning
                                : models.text_encoder().encode(group.captions, {}, 0, 0,
                                                               references_of(from_images, std::ssize(group.names)));
        for (size_t k = 0; k < from_images.size(); ++k)
          pass.conditioning[ReferenceImages::field(k)] = models.media_autoencoder().latents(from_images[k]);
      }
      const HostArrays tokens = family.tokenize(group.captions);
      for (int64_t i = 0; i < std::ssize(group.names); ++i)
        for (const Pass& pass : passes)
          shards.add(family.spec().records->to_record(family.spec(), md::row_of(pass.moments, i), row_of(tokens, i),
                                                      row_of(pass.conditioning, i), noise),
                     numbers_of(r, shards.count()));
    }
  }
  check(shards.count() > 0, Code::io, "{}: none of {} images can be decoded; the first: {}", source->name(), skipped,
        first);
  if (skipped > 0) log_warning("{}: {} images cannot be decoded and are skipped", source->name(), skipped);
}

int64_t write_records(const TrainingRequest& r, const std::string& folder) {
  const TfrecordKeys& keys = r.data.tfrecords;
  SourcePlan from = plan_source(r.data, DataMode::images);
  if (!keys.data_files_pattern.empty()) {
    from = {.config = r.data.source};
    from.config.hf_train_files = keys.data_files_pattern;
    from.config.dataset_type.clear();
  }
  TfrecordShards shards(folder, keys.no_records_per_shard);
  if (r.data.denoise.cache_latents_text_encoder_outputs)
    write_encoded(r, from, shards);
  else
    write_stored(open_data(r, from), from.config, shards);
  check(!keys.enable_eval_timesteps || shards.count() == keys.num_eval_samples, Code::io,
        "{}: {} records can be encoded; expected num_eval_samples={}", folder, shards.count(), keys.num_eval_samples);
  shards.close();
  return shards.count();
}

}  // namespace

int64_t prepare_tfrecords(const TrainingRequest& r) {
  r.rules.check_tfrecords();
  if (!r.data.tfrecords.extracted_files_dir.empty())
    log_warning("extracted_files_dir is ignored: .tar files are read in place");
  const std::string& place = r.data.tfrecords.tfrecords_dir;
  if (!is_remote(place)) return write_records(r, place);
  check(list_all_files(place).empty(), Code::io, "tfrecords_dir '{}': not empty; expected a new folder", shown(place));
  const std::string local_folder = local_cache_path(place);
  remove_folder(local_folder);
  const int64_t count = write_records(r, local_folder);
  RemoteSync({{local_folder, place}}, {}).settle();
  return count;
}

Command prepare_tfrecords_command() {
  return {"prepare_tfrecords", kConfigArguments,
          "write the dataset of a config as TFRecord files, encoded or unencoded",
          [](const Words& words) {
            const TrainingRequest request = training_request(config_of("prepare_tfrecords", words));
            fmt::print("{} records in {}\n", prepare_tfrecords(request), request.data.tfrecords.tfrecords_dir);
          },
          [](const KeyPrinter& print) {
            print_config_keys(print, {"run", "devices", "model", "data"});
          }};
}

}  // namespace md
