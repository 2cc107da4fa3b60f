#include <filesystem>
#include <memory>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/commands/check_data.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train.h"
#include "maxdiffusion/media/decode_image.h"
#include "maxdiffusion/run/outputs.h"
#include "maxdiffusion/run/trained_model.h"
#include "maxdiffusion/run/training_data.h"
#include "maxdiffusion/settings/changed_keys.h"

namespace md {
namespace {

/// Collects the errors of a check.
class Faults {
 public:
  /// Runs `part` and logs its error. Returns whether it threw none.
  bool pass(const std::string& name, const std::function<void()>& part) {
    try {
      part();
      return true;
    } catch (const Error& e) {
      log_error("{}: {}", name, e.what());
      if (count_++ == 0) first_ = e.code();
      return false;
    }
  }
  void finish() const {
    if (count_ > 0) throw Error(first_, fmt::format("check: {} found; a run would fail", counted(count_, "fault")));
    log_info("check: no faults found");
  }

 private:
  int64_t count_ = 0;
  Code first_ = Code::internal;
};

/// Logs the lengths of all captions and the sizes of all images, with the warnings that training would log.
void check_records(const DataPlan& plan, bool upscales, const Family& family) {
  if (!plan.reads_images()) return;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.source));
  std::vector<std::string> captions;
  int64_t images = 0, small = 0, empty = 0;
  size_t longest = 0;
  std::map<std::pair<int64_t, int64_t>, ImageSize> size_of;  // by pixels and height
  std::string smallest;
  const auto check_record = [&](const Record& r) {
    captions.push_back(plan.dreambooth ? plan.dreambooth->instance_prompt
                                       : applied(plan.images.of_folder(r.folder).captions, r.caption, 0, r.name));
    longest = std::max(longest, captions.back().size());
    empty += captions.back().empty() ? 1 : 0;
    if (r.image.bytes.empty() || family.spec().videos()) return;  // a clip's header does not contain its size
    try {
      const ImageSize s =
          decode_stored_image(r.image.bytes.data(), r.image.bytes.size(), r.name, {.only_size = true}).size;
      ++images;
      size_of[{s.height * s.width, s.height}] = s;
      if (std::min(s.height, s.width) >= plan.images.resolution) return;
      if (small++ == 0) smallest = fmt::format("{} of {}", r.name, to_string(s));
    } catch (const Error& e) {
      log_warning("{}", e.message());
    }
  };
  each_record(*source, check_record);
  log_info("{}: {}, the longest of {}; {} empty", source->name(), counted(std::ssize(captions), "caption"),
           counted(static_cast<int64_t>(longest), "byte"), empty);
  family.tokenize(captions);  // warns of truncated captions
  if (size_of.empty()) return;
  log_info("{}: {} from {} to {}", source->name(), counted(images, "image"), to_string(size_of.begin()->second),
           to_string(size_of.rbegin()->second));
  if (small > 0 && upscales)
    log_warning("{} smaller than resolution={} and enlarged; the first is {}",
                small == 1 ? "1 image is" : fmt::format("{} images are", small), plan.images.resolution, smallest);
}

/// Reads all encoded records, as an epoch does.
void check_encoded_records(const DataPlan& plan) {
  if (plan.mode != DataMode::encoded_records) return;
  const std::shared_ptr<const RecordSource> source = open_source(prepare_source(plan.source));
  int64_t records = 0;
  std::map<std::string, Shape> first;
  each_record(*source, [&](const Record& r) {
    if (records++ == 0)
      for (const auto& [name, a] : r.arrays) first[name] = a.shape();
    for (const auto& [name, a] : r.arrays) {
      const auto known = first.find(name);
      check(known != first.end() && a.shape() == known->second, Code::io,
            "{}: '{}' is {}; expected {}, as in the first record", r.name, name, to_string(a.shape()),
            known == first.end() ? "none" : to_string(known->second));
    }
    check(r.arrays.size() == first.size(), Code::io, "{}: {} arrays; expected {}, as in the first record", r.name,
          r.arrays.size(), first.size());
  });
  log_info("{}: {}", source->name(), counted(records, "encoded record"));
}

/// Traces the training step, opens all weights by name and shape, and tries the newest checkpoint as train does. The
/// autoencoder's weights are also read. Returns what the checkpoint says of its run.
std::optional<StateInfo> check_weights(ModelComponents& m, const TrainPlan& plan) {
  std::optional<StateInfo> resumed = check_start(m, plan, "train");
  for (const auto& [name, component] : m.folder().components()) {
    const ParamTable params = m.folder().params(name);
    m.open_weights(params, name);
    if (name == m.family()->spec().autoencoder->component) m.autoencoder_values();
    log_info("{}: {} parameters", name, params.count());
  }
  return resumed;
}

/// Checks that do not need the model, if it cannot be opened.
void check_without_model(const TrainingRequest& r, Faults& faults) {
  faults.pass("outputs", [&] { check_outputs(r.run, ""); });
  faults.pass("data", [&] {
    const DataMode mode = data_mode(r.data, false);
    if (mode == DataMode::replay || mode == DataMode::encoded_records) return;
    open_source(prepare_source(plan_source(r.data, mode)));
  });
}

}  // namespace

void check_run(const TrainingRequest& r) {
  Faults faults;
  const RunInfo& run = r.run;
  std::unique_ptr<ModelComponents> models;
  if (!faults.pass("devices and model folder", [&] { models = std::make_unique<ModelComponents>(r.components); })) {
    check_without_model(r, faults);
    return faults.finish();
  }
  TrainPlan plan;
  bool planned = faults.pass("keys", [&] { models->denoiser_options(); });
  for (const auto& [name, part] : plan_parts(r, models->folder(), models->family(), models->device_counts()))
    planned &= faults.pass(name, [&, &part = part] { part(plan); });
  if (plan.samples) faults.pass("samples", [&] { check_samples_of_run(*models, plan.samples->sampling); });
  if (plan.eval)
    faults.pass("evaluation", [&] {
      check_held_out(plan);
      if (plan.eval->source.array_columns.empty()) return;
      const HeldOut held_out = held_out_samples(*models, plan);
      for (int64_t i = 0; i < held_out.count; ++i) held_out.read(i);
    });
  faults.pass("outputs", [&] { check_outputs(run, plan.data.cache.folder); });
  std::optional<TrainingData> data;
  if (planned)
    faults.pass("data", [&] {
      data = open_unencoded_data(*models, plan);
      for (const auto& [name, a] : data->batches->next()) log_info("first batch: {} {}", name, to_string(a.shape()));
      check_records(plan.data, !r.data.images.bucket_no_upscale, *models->family());
      check_encoded_records(plan.data);
      if (plan.data.reads_images())
        check_images(open_source(prepare_source(plan.data.source)), plan.data.images, r.run.seed, r.check_dir);
    });
  std::optional<StateInfo> resumed;
  if (data)
    faults.pass("weights", [&] {
      resumed = check_weights(*models, with_data(plan, data->task, data->buckets, data->batches->size()));
    });
  faults.pass("the run before", [&] {
    if (resumed) {
      const std::string checkpoint = shown(checkpoint_folder(run.checkpoint_dir, resumed->step));
      log_info("it would continue from {}", checkpoint);
      const std::string change = change_between(resumed->dataset, data->dataset);
      if (!change.empty())
        log_warning("the data has changed since checkpoint {}: {}; it would continue with the data that is there",
                    checkpoint, change);
    }
    report_changed_keys(run);
  });
  faults.finish();
}

namespace {

/// Whether a word names data instead of a config: a folder, or a dataset file. An ai-toolkit file is YAML as well.
bool names_data(const std::string& word) {
  std::error_code ec;
  if (word.find('=') != word.npos) return false;
  if (std::filesystem::is_directory(word, ec) || word.ends_with(".toml") || word.ends_with(".json")) return true;
  if (!(word.ends_with(".yaml") || word.ends_with(".yml")) || !exists(word)) return false;
  const std::string text = "\n" + read_file(word);
  return text.find("\nconfig:") != text.npos || text.find("\ndatasets:") != text.npos;
}

/// Whether a folder contains folders with kohya's names ("10_name").
bool has_repeats(const std::string& folder) {
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ec)) {
    const std::string name = entry.path().filename().string();
    const size_t digits = name.find_first_not_of("0123456789");
    if (digits != 0 && digits != name.npos && name[digits] == '_' && entry.is_directory()) return true;
  }
  return false;
}

/// Checks data without a model, so sizes and captions are not compared with a model's limits.
void check_data_alone(const Words& words) {
  std::error_code ec;
  const bool folder = std::filesystem::is_directory(words[0], ec);
  Words keys(words.begin() + 1, words.end());
  keys.push_back((!folder || has_repeats(words[0]) ? "dataset_config=" : "train_data_dir=") + words[0]);
  const TrainingRequest r = training_request(config_of_keys(keys));
  const SourcePlan plan = plan_source(r.data, DataMode::images);
  const ImageKeys& k = r.data.images;
  ImageConfig images{.resolution = k.resolution,
                     .center_crop = k.center_crop,
                     .random_crop = k.random_crop,
                     .random_flip = k.random_flip,
                     .mask = k.alpha_mask ? MaskFrom::alpha : MaskFrom::none,
                     .unmasked_weight = k.unmasked_weight};
  const DataSourceConfig config = prepare_source(plan);
  if (holds_clips(config))  // of any length, unless a key says how long they are trained
    images.clip.emplace(ClipConfig{.frames = r.data.sample.num_frames.value_or(1), .fps = r.data.sample.fps});
  if (!plan.config.folders.empty())
    images = plan_folders(images, plan.config.folders, r.data, nullptr);
  else if (k.enable_bucket)
    images.buckets.emplace(AspectBucketConfig{.resolution = k.resolution,
                                              .min_bucket_reso = k.min_bucket_reso,
                                              .max_bucket_reso = k.max_bucket_reso,
                                              .bucket_reso_steps = k.bucket_reso_steps,
                                              .bucket_no_upscale = k.bucket_no_upscale,
                                              .frames = {images.clip ? images.clip->frames : 1}});
  check_images(open_source(config), images, r.run.seed, r.check_dir);
}

}  // namespace

Command check_command() {
  return {
      "check", "CONFIG|DATA [key=value …]",
      "check everything that a training run needs up to its first step, or a dataset alone, and report what is wrong",
      [](const Words& words) {
        if (!words.empty() && names_data(words[0])) return check_data_alone(words);
        check_run(training_request(config_of("check", words)));
      },
      print_all_config_keys};
}

}  // namespace md
