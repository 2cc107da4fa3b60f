#include "maxdiffusion/run/training_data.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/data/batches/image_batches.h"
#include "maxdiffusion/run/encode_dataset.h"
#include "maxdiffusion/run/folder_samples.h"
#include "maxdiffusion/run/train_autoencoder.h"
#include "maxdiffusion/tasks/replay.h"

namespace md {
namespace {

/// The checkpoint from which the run continues, if it does.
using Resumed = std::optional<StateInfo>;

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

/// The only row of each array, without axis 0, with a prefixed name.
HostArrays constants_of(const HostArrays& one_caption) {
  HostArrays out;
  for (const auto& [name, a] : one_caption) out["empty_" + name] = without_batch(a);
  return out;
}

BatchConfig batch_config(const ModelComponents& models, const TrainPlan& plan) {
  const int64_t update = plan.update_size();
  return {.stream = {.seed = plan.run.seed,
                     .shuffle = plan.data.shuffle,
                     .share = share_of_update(models.devices(), update, plan.loop.step.accumulation)},
          .batch = update,
          .workers = plan.data.workers};
}

/// Batches of the samples of each bucket, or of all.
std::unique_ptr<Dataset> batches_of(std::vector<std::shared_ptr<const Examples>> buckets, bool several_sizes,
                                    const BatchConfig& c) {
  if (several_sizes) return examples_in_aspect_buckets(std::move(buckets), c.batch, c.stream);
  return example_batches(buckets[0], c.batch, c.stream.seed, c.stream.shuffle, c.stream.share);
}

/// Samples without fields that note which of them are read.
class Noted final : public Examples {
 public:
  explicit Noted(int64_t size) : read_(static_cast<size_t>(size)) {}
  int64_t size() const override { return std::ssize(read_); }
  HostArrays read(const ExampleRef& which) const override {
    read_[static_cast<size_t>(which.index)] = true;
    return {};
  }
  bool is_read(size_t i) const { return read_[i]; }

 private:
  mutable std::vector<bool> read_;
};

/// Which samples of buckets of these sizes the run reads, from the beginning and from the checkpoint that it resumes.
std::vector<std::vector<bool>> samples_read(const TrainPlan& plan, const std::vector<int64_t>& sizes,
                                            const Resumed& resumed) {
  const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0}), batch = plan.update_size();
  const int64_t steps = plan.loop.step.optim.max_train_steps;
  std::vector<std::vector<bool>> out;
  if (plan.autoencoder || steps <= 0 || steps * batch >= 2 * all) {
    for (const int64_t n : sizes) out.emplace_back(n, true);
    return out;
  }
  std::vector<std::shared_ptr<const Noted>> noted;
  for (const int64_t n : sizes) noted.push_back(std::make_shared<Noted>(n));
  BatchConfig config;  // rows of all processes
  config.stream = {.seed = plan.run.seed, .shuffle = plan.data.shuffle};
  config.batch = batch;
  const std::unique_ptr<Dataset> batches =
      batches_of({noted.begin(), noted.end()}, plan.data.images.several_sizes(), config);
  for (int64_t i = 0; i < steps; ++i) batches->next();
  if (resumed) {
    batches->seek(resumed->data);
    for (int64_t i = resumed->step; i < steps; ++i) batches->next();
  }
  for (const auto& bucket : noted) {
    out.emplace_back();
    for (size_t i = 0; i < static_cast<size_t>(bucket->size()); ++i) out.back().push_back(bucket->is_read(i));
  }
  return out;
}

/// Which images of each bucket the run reads. `folders`: repeat images, unless null.
ImagesRead images_read(const TrainPlan& plan, const std::shared_ptr<const DataFolders>& folders,
                       const Resumed& resumed) {
  return [&plan, folders, resumed](const std::vector<std::vector<int64_t>>& records) {
    const auto repeats = [&](int64_t record) { return folders ? folders->repeats(record) : 1; };
    std::vector<int64_t> sizes;
    for (const auto& bucket : records) {
      sizes.push_back(0);
      for (const int64_t record : bucket) sizes.back() += repeats(record);
    }
    const std::vector<std::vector<bool>> samples = samples_read(plan, sizes, resumed);
    std::vector<std::vector<bool>> out;
    for (size_t b = 0; b < records.size(); ++b) {
      out.emplace_back();
      auto at = samples[b].begin();
      for (const int64_t record : records[b]) {
        const auto end = at + repeats(record);
        out.back().push_back(std::find(at, end, true) != end);
        at = end;
      }
    }
    return out;
  };
}

/// Pairs of images of the subject and of its class; the shorter set is repeated.
class Pairs final : public Examples {
 public:
  Pairs(std::shared_ptr<const Examples> instances, std::shared_ptr<const Examples> classes)
      : instances_(std::move(instances)), classes_(std::move(classes)) {}
  int64_t size() const override { return std::max(instances_->size(), classes_->size()); }
  HostArrays read(const ExampleRef& which) const override {
    HostArrays out = instances_->read({which.index % instances_->size(), which.bits});
    for (const auto& [name, a] : classes_->read({which.index % classes_->size(), which.bits}))
      out.emplace("class_" + name, a);
    return out;
  }

 private:
  std::shared_ptr<const Examples> instances_, classes_;
};

/// The generated images of DreamBooth's class.
DataSourceConfig source_of_class(const DataPlan& plan) {
  DataSourceConfig source = plan.source.config;
  source.train_data_dir = plan.dreambooth->class_data_dir;
  return source;
}

/// Images as they are read, with token ids.
void open_images(ModelComponents& models, const TrainPlan& plan, const Resumed&, TrainingData& data) {
  const ImageConfig& images = plan.data.images;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.data.source));
  data.dataset = source->identity();
  std::error_code ec;
  if (const auto& d = plan.data.dreambooth; d && !std::filesystem::is_empty(d->class_data_dir, ec) && !ec)
    data.dataset = combined(data.dataset, open_source(source_of_class(plan.data))->identity());
  auto tokens = [family = data.task.family](const std::vector<std::string>& captions) {
    return family->tokenize(captions);
  };
  data.constants = constants_of(tokens({""}));
  const BatchConfig batches = batch_config(models, plan);
  if (!images.several_sizes()) {
    data.batches = image_batches(source, images, batches, tokens);
    return;
  }
  ImagesInBuckets sorted = sort_into_aspect_buckets(source, images);
  if (const auto folders = std::dynamic_pointer_cast<const DataFolders>(source))
    sorted = repeated(std::move(sorted), *folders);
  std::vector<int64_t> counts;
  counts.reserve(sorted.records.size());
  for (const auto& records : sorted.records) counts.push_back(static_cast<int64_t>(records.size()));
  data.buckets = sorted.sizes;
  log_aspect_buckets(sorted.sizes, counts, batches.batch);
  data.batches = image_batches(std::move(sorted), images, batches, tokens);
}

void open_dreambooth(ModelComponents& models, const TrainPlan& plan, const Resumed& resumed, TrainingData& data) {
  const DreamboothPlan& d = *plan.data.dreambooth;
  const auto subject = open_source(plan.data.source.config), of_class = open_source(source_of_class(plan.data));
  data.dataset = combined(subject->identity(), of_class->identity());
  const ImageConfig& images = plan.data.images;
  const int64_t pairs =
      std::max(images_to_encode(plan.data.cache, subject, images), images_to_encode(plan.data.cache, of_class, images));
  const ImagesRead read = [&](const std::vector<std::vector<int64_t>>& records) {
    std::vector<bool> out(records[0].size());
    const std::vector<bool> read_pairs = samples_read(plan, {pairs}, resumed)[0];
    for (size_t i = 0; i < read_pairs.size(); ++i)
      if (read_pairs[i]) out[i % out.size()] = true;
    return std::vector<std::vector<bool>>{out};
  };
  auto load = [&](const std::shared_ptr<const RecordSource>& source, const std::string& caption) {
    return cached_examples(
        encode_dataset(models, plan.data.cache, source, images, text_of(data.task), &caption, read).buckets[0], images);
  };
  const auto instances = load(subject, d.instance_prompt), classes = load(of_class, d.class_prompt);
  log_info("DreamBooth: {} images of the subject, {} of its class", instances->size(), classes->size());
  const BatchConfig batches = batch_config(models, plan);
  data.batches =
      scaled(models.family(), example_batches(std::make_shared<Pairs>(instances, classes), batches.batch,
                                              batches.stream.seed, batches.stream.shuffle, batches.stream.share));
}

/// The batches of a recorded run.
void open_recorded(ModelComponents& models, const TrainPlan& plan, const Resumed&, TrainingData& data) {
  DenoiseTask& task = data.task;
  const std::string& file = plan.data.replay;
  const int64_t accumulation = plan.loop.step.accumulation;
  Replay replay = open_replay(file, *task.family, task.process);
  check(plan.optim.max_train_steps <= replay.steps, Code::invalid_config,
        "max_train_steps is {}; expected at most the number of steps in replay_batches '{}': {}",
        plan.optim.max_train_steps, file, replay.steps);
  check(replay.batch_size % accumulation == 0, Code::invalid_config,
        "replay_batches '{}': {} images a step; expected a multiple of gradient_accumulation_steps={}", file,
        replay.batch_size, accumulation);
  task.text = embeddings_input(replay.text_length);
  task.references = replay.references;
  task.batch_size = part_of_replica(replay.batch_size / accumulation, plan.replicas);
  task.size = task.family->spec().autoencoder->media_size(replay.latent);
  data.batches = std::move(replay.data);
  if (plan.replicas == 1) return;
  const BatchShare share = share_of_update(models.devices(), replay.batch_size, accumulation);
  data.batches = mapped(std::move(data.batches), [mine = share.rows(replay.batch_size)](const Batch& whole) {
    Batch part;
    for (const auto& [name, a] : whole)
      for (size_t i = 0; i < mine.size(); ++i)
        add_rows(part[name], std::ssize(mine), static_cast<int64_t>(i), rows(a, mine[i], 1));
    return part;
  });
}

/// Latents and embeddings computed by another program.
void open_encoded_records(ModelComponents& models, const TrainPlan& plan, const Resumed&, TrainingData& data) {
  DenoiseTask& task = data.task;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.data.source));
  data.dataset = source->identity();
  data.batches = mapped(array_batches(source, batch_config(models, plan)), [family = task.family](const Batch& b) {
    return family->spec().records->from_records(family->spec(), b);
  });
  const Batch first = data.batches->next();
  data.batches->seek({});
  const bool random = first.contains("latents");
  if (random) task.media = latents_input();
  Dims latent = first.at(random ? "latents" : "moments").dims();
  latent.erase(latent.begin());
  if (!random) latent.back() /= 2;
  task.size = task.family->spec().autoencoder->media_size(latent);
  const std::vector<Field> fields = task.family->spec().conditioning;
  if (!fields.empty() && fields[0].shape.rank() == 2) task.text = embeddings_input(first.at(fields[0].name).dims()[1]);
}

/// Random latents and embeddings, for tests without data.
void open_synthetic(ModelComponents& models, const TrainPlan& plan, const Resumed&, TrainingData& data) {
  const DataSourceConfig& from = plan.data.source.config;
  const MediaSize& size = data.task.size;
  log_info("{} Synthetic Data Iterator Configuration:", models.folder().pipeline());
  log_info("  samples: {}", from.synthetic_num_samples ? std::to_string(*from.synthetic_num_samples) : "without end");
  log_info("  height {}, width {}, frames {}", size.height, size.width, size.frames);
  for (const auto& [name, shape] : from.synthetic_arrays)
    log_info("  {}: {}", name, to_string(batched(data.task.batch_size, shape)));
  data.batches = array_batches(open_source(from), batch_config(models, plan));
}

/// Images encoded before training, by an autoencoder that is trained first if a key says so.
void open_encoded_images(ModelComponents& models, const TrainPlan& plan, const Resumed& resumed, TrainingData& data) {
  const ImageConfig& images = plan.data.images;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.data.source));
  data.dataset = source->identity();
  const auto folders = std::dynamic_pointer_cast<const DataFolders>(source);
  if (plan.autoencoder) {
    const auto pixels = cache_pixels(plan.data.cache, source, images).buckets[0];
    check_batch_size(plan,
                     (folders ? folder_samples(pixels, folders, images, {}) : cached_examples(pixels, {}))->size());
    train_autoencoder(models, plan, cached_examples(pixels, {}));
  }
  const bool tokens = data.task.text->tokens();  // a text encoder is trained
  const bool vary = folders && (tokens || folders->captions_vary());
  if (vary) {
    check(data.task.references == 0 || data.task.family->seen({{64, 64}}).tokens == 0, Code::invalid_config,
          "{}: captions vary; expected none that are shuffled or chosen: this model's texts hold reference images, and "
          "are encoded once",
          source->name());
    log_info("{}: they are encoded in every step, images once",
             tokens ? "captions have a trained word" : "captions vary");
    data.task.text = tokens_input();
  }
  const CachedImages encoded =
      encode_dataset(models, plan.data.cache, source, images, vary ? CachedText::none : text_of(data.task), nullptr,
                     images_read(plan, folders, resumed));
  log_info("{} {}, {} skipped", encoded.images, images.clip ? "clips" : "images", encoded.skipped);
  if (plan.autoencoder) {
    models.fit_autoencoder([&](const auto& take) { encoded.buckets[0]->each("moments", take); });
    data.task.family = models.family();
  }
  const bool drops = std::ranges::any_of(images.folders, [](const auto& f) { return f.captions.dropout > 0; });
  FolderText text;
  if (data.task.caption_dropout > 0 || (drops && !vary)) {
    const HostArrays empty = vary || tokens ? data.task.family->tokenize({""}) : models.text_encoder().encode({""});
    if (data.task.caption_dropout > 0) data.constants = constants_of(empty);
    text.empty = empty;
  }
  if (vary)
    text.fields = [family = data.task.family](const std::string& caption) { return family->tokenize({caption}); };
  const BatchConfig batches = batch_config(models, plan);
  std::vector<std::shared_ptr<const Examples>> samples;
  std::vector<int64_t> counts;
  for (const auto& bucket : encoded.buckets) {
    samples.push_back(folders ? folder_samples(bucket, folders, images, text) : cached_examples(bucket, images));
    counts.push_back(samples.back()->size());
  }
  if (images.several_sizes()) {
    data.buckets = encoded.sizes;
    log_aspect_buckets(data.buckets, counts, batches.batch);
  }
  data.batches = scaled(models.family(), batches_of(std::move(samples), images.several_sizes(), batches));
}

TrainingData open_data(ModelComponents& models, const TrainPlan& plan, const Resumed& resumed, bool encode) {
  using Open = void (*)(ModelComponents&, const TrainPlan&, const Resumed&, TrainingData&);
  constexpr Open kOpen[] = {open_images,    open_encoded_images, open_encoded_records,  // by DataMode
                            open_synthetic, open_dreambooth,     open_recorded};
  const DataMode mode = plan.data.mode;
  check(!plan.task.images || (mode != DataMode::images && mode != DataMode::encoded_records), Code::invalid_config,
        "cache_latents_text_encoder_outputs: false or encoded records; expected true and clips: this model is "
        "conditioned on images, which are encoded once");
  const bool as_read = !encode && (mode == DataMode::cached_latents || mode == DataMode::dreambooth);
  TrainingData data{plan.task, nullptr};
  (as_read ? open_images : kOpen[static_cast<size_t>(mode)])(models, plan, resumed, data);
  return data;
}

}  // namespace

TrainingData open_training_data(ModelComponents& models, const TrainPlan& plan,
                                const std::optional<StateInfo>& resumed) {
  return open_data(models, plan, resumed, true);
}

TrainingData open_unencoded_data(ModelComponents& models, const TrainPlan& plan) {
  return open_data(models, plan, {}, false);
}

void check_held_out(const TrainPlan& plan) {
  if (plan.data.source.emoji) prepare_source(plan.data.source);
  open_source(plan.eval->source);
}

HeldOut held_out_samples(ModelComponents& models, const TrainPlan& plan) {
  const std::shared_ptr<const Family> family = models.family();
  const EvalPlan& eval = *plan.eval;
  DataSourceConfig where = eval.source;
  const std::string timesteps_field = "timesteps";
  if (where.array_columns.empty()) {
    const auto samples = cached_examples(
        encode_dataset(models, plan.data.cache, open_source(where), eval.images, text_of(plan.task)).buckets.front(),
        eval.images);
    HeldOut held_out;
    held_out.count = samples->size();
    held_out.read = [samples, family](int64_t i) {
      return scaled(*family, batch_of(*samples, {{.index = i, .bits = 0}}));
    };
    return held_out;
  }
  where.array_columns.push_back(timesteps_field + "|");
  const std::shared_ptr<const RecordSource> source = open_source(where);
  HeldOut held_out;
  std::vector<std::pair<int64_t, int64_t>> places;  // for records in shards: shard and offset of each
  std::map<std::string, Shape> first;
  auto add = [&](const Record& r) {
    for (const auto& [name, a] : r.arrays) {
      const Shape& shape = first.try_emplace(name, a.shape()).first->second;
      check(a.shape() == shape, Code::io, "{}: '{}' is {}; expected {}, as in the records before", r.name, name,
            to_string(a.shape()), to_string(shape));
    }
    const auto time = r.arrays.find(timesteps_field);
    const bool has_time = time != r.arrays.end();
    check(held_out.count == 0 || has_time != held_out.timesteps.empty(), Code::io,
          "{}: some records of '{}' have '{}' and some do not", r.name, eval.keys.eval_data_dir, timesteps_field);
    ++held_out.count;
    if (!has_time) return;
    check(time->second.shape().elements() == 1, Code::io, "{}: '{}' is {}, expected one number", r.name,
          timesteps_field, to_string(time->second.shape()));
    held_out.timesteps.push_back(static_cast<int64_t>(time->second.to_doubles()[0]));
  };
  // If records have no timesteps, the first ones are measured at every timestep, and the others are not read.
  auto enough = [&] {
    return held_out.timesteps.empty() && held_out.count >= eval.keys.eval_max_number_of_samples_in_bucket;
  };
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
  held_out.read = [source, family, timesteps_field, places = std::move(places)](int64_t i) {
    auto in_shard = [&](const std::pair<int64_t, int64_t>& at) {
      return (*source->open(at.first, at.second)->next())();
    };
    Record r = places.empty() ? source->read(i) : in_shard(places.at(static_cast<size_t>(i)));
    r.arrays.erase(timesteps_field);
    HostArrays one;
    for (const auto& [name, a] : r.arrays) one[name] = a.reshaped(batched(1, a.shape()).dims);
    return family->spec().records->from_records(family->spec(), one);
  };
  return held_out;
}

}  // namespace md
