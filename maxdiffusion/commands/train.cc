#include "maxdiffusion/commands/train.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/shortened.h"
#include "maxdiffusion/checkpoint/remote_checkpoints.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/lora/lora_merge.h"
#include "maxdiffusion/lora/lora_scope.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/metrics/similarity.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/run/ignored_keys.h"
#include "maxdiffusion/run/lora_files.h"
#include "maxdiffusion/run/outputs.h"
#include "maxdiffusion/run/phase.h"
#include "maxdiffusion/run/shared_folder.h"
#include "maxdiffusion/run/train_autoencoder.h"
#include "maxdiffusion/run/training_data.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/settings/changed_keys.h"
#include "maxdiffusion/settings/compatibility.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

/// What matrices the trained denoisers get.
LoraConfig lora_config(const RunModels& m) {
  return training_lora(m.config().lora, m.family()->spec().lora_targets(m.family()->spec().denoiser()));
}

/// Starting values of the LoRA matrices, of `lora_init` or drawn; made when called.
std::function<NamedPieces()> initial_matrices(const RunModels& m, const ParamTable& params) {
  const LoraKeys& keys = m.config().lora;
  std::vector<std::string> targets = lora_config(m).targets;
  if (m.config().denoise.train_text_encoder && keys.lora_target_modules.empty()) {
    const std::vector<std::string> more = m.family()->spec().lora_targets(m.family()->spec().text_components().at(0));
    targets.insert(targets.end(), more.begin(), more.end());
  }
  check_lora_targets(targets, params);
  if (keys.lora_init.empty()) return [&params, seed = m.run().seed] { return as_pieces(initial_lora(params, seed)); };
  const LoraFile file =
      read_lora(keys.lora_init, lora_targets(m.folder(), *m.family()), trained_denoisers(m.config(), *m.family())[0]);
  return [values = as_pieces(initial_lora(params, file, lora_config(m)))] { return values; };
}

std::function<NamedPieces()> initial_values(RunModels& m, const ParamTable& params) {
  auto base = std::make_shared<const ParamTable>(base_params(params));
  std::set<std::string> components;
  for (const Param& p : base->params()) components.insert(p.model);
  std::vector<std::function<NamedPieces()>> parts;
  parts.reserve(components.size() + 1);
  for (const std::string& component : components) parts.push_back(m.open_weights(*base, component));
  if (std::ranges::any_of(params.params(), is_lora)) parts.push_back(initial_matrices(m, params));
  return [parts, base] {
    NamedPieces all;
    for (const auto& part : parts) all.merge(part());
    return all;
  };
}

void complete_checkpoint(RunModels& m, CheckpointContent& content, const ParamTable& params,
                         const NamedPieces& trained) {
  m.complete(content);
  if (!m.config().lora.train_lora) return;
  content.more = [&m, file = trained_lora(params, as_arrays(trained), lora_config(m))](const std::string& to) {
    const Family& family = *m.family();
    const std::vector<std::string> denoisers = trained_denoisers(m.config(), family);
    const char* layout = family.spec().lora.original_names ? "comfyui" : "kohya";
    for (size_t i = 0; i < denoisers.size(); ++i) {
      LoraFile own = file;  // and the text encoders'
      for (const std::string& other : denoisers)
        if (other != denoisers[i]) own.pairs.erase(other);
      const std::string folder = denoisers.size() == 1 ? to : to + "/" + kExpertFolders[i];
      write_peft_lora(folder, own, lora_names(m.folder(), family));
      write_lora_layout(fmt::format("{}/lora_{}.safetensors", folder, layout), own, m.folder(), family, layout,
                        kohya_metadata(m.config(), m.run(), family));
    }
  };
}

/// The prompts' media, drawn with what is trained so far.
HostArray drawn(RunModels& m, const ParamTable& params, const HostArrays& trained) {
  const RunConfig& c = m.config();
  const WeightsOf weights = [&](const ParamTable& p, const std::string& component) {
    if (is_trained(m, component) && !c.lora.train_lora) return of_component(p, component, trained);
    HostArrays values = as_arrays(m.open_weights(p, component)());
    if (is_trained(m, component)) merge_loras({{trained_lora(params, trained, lora_config(m)), 1}}, p, values);
    return values;
  };
  std::optional<TextEncoder> own;
  if (c.denoise.train_text_encoder)
    own.emplace(m.devices(), m.family(), m.text_batch(), weights, scope_options(c.layers), c.compile);
  return sample_images(m, own ? *own : m.text_encoder(), weights);
}

/// Shows videos one by one, and `grid` of pictures, in TensorBoard; `events`: null where nothing is written.
void show(EventWriter* events, const RunModels& m, int64_t step, const std::string& tag, const HostArray& media,
          const HostArray& grid) {
  if (!events) return;
  if (grid) events->image(tag, grid, step);
  for (int64_t i = 0; media.dims().size() == 5 && i < media.dims()[0]; ++i)
    events->video(fmt::format("{}/{}", tag, i), image_of_batch(media, i), m.config().sample.fps, step);
}

void write_grid(EventWriter* events, const RunModels& m, int64_t step, const HostArray& media) {
  const std::string path = fmt::format("{}/samples/step_{:06}", m.run().folder, step);
  show(events, m, step, "samples", media, write_sample_grid(m, media, path));
  log_info("samples of step {}: {}.png", step, path);
}

/// With enable_ssim: how much training changed the first sample.
void compare(const HostArray& before, const HostArray& after) {
  const HostArray a = image_of_batch(before, 0), b = image_of_batch(after, 0);
  log_info("SSIM score after training is {:.6f}", structural_similarity(a, b));
  log_info("PSNR after training is {:.2f} dB", peak_signal_to_noise(a, b));
}

void write_config(const RunInfo& run) {
  if (!run.is_coordinator) return;
  make_folders(run.folder + "/samples");
  write_file_atomic(run.folder + "/config.yml", run.config_yaml);
  if (!run.config_copy.empty()) put_text(run.config_copy, run.config_yaml);
}

/// Throws io, naming the key, where an output of a run cannot be written.
void check_outputs(const RunConfig& c, const RunInfo& run) {
  check_has_folder(run);
  const auto check = [](const std::string& folder, const char* key) {
    if (!folder.empty() && !is_remote(folder)) check_writable(folder, key);
  };
  const auto check_file = [&](const std::string& file, const char* key) {
    if (!file.empty()) check(std::filesystem::path(file).parent_path().string(), key);
  };
  for (const char* part : {"samples", "checkpoints", "tensorboard"}) check(below(run.place, part), "output_dir");
  check(c.loop.checkpoint_dir, "checkpoint_dir");
  if (c.denoise.cache_latents_text_encoder_outputs) check(c.batches.dataset_save_location, "dataset_save_location");
  if (c.run.save_config_to_gcs) check(c.run.base_output_directory, "base_output_directory");
  if (run.metrics.write_metrics) check_file(run.metrics.metrics_file, "metrics_file");
  check_file(run.timing_file, "timing_metrics_file");
}

/// What is known of a run before its data is read, and what throws where it would fail by that: each part by name.
using Part = std::pair<const char*, std::function<void()>>;
std::vector<Part> parts_of_plan(const RunModels& m) {
  const RunConfig& c = m.config();
  const auto plan = [&m] { return planned_training(m, m.devices().count(), m.devices().replicas()); };
  return {{"keys",
           [&m, &c, plan] {
             plan();
             if (c.model.train_new_vae)
               global_batch(c.vae.vae_per_device_batch_size, m.devices().count(), "vae_per_device_batch_size");
           }},
          {"sizes",
           [&m, &c] {
             if (c.is_dreambooth())
               check_size(c.sample, *m.family(), training_size(c, *m.family()));
             else if (c.denoise.replay_batches.empty() && !c.reads_encoded_records() &&
                      c.source.dataset_type != "synthetic")
               image_config(c, *m.family());
           }},
          {"samples",
           [&m, &c] {
             if (planned_samples(c, m.run())) check_samples_of_run(m);
           }},
          {"evaluation",
           [&c, plan] {
             if (c.eval.eval_every <= 0) return;
             // Makes the datasets of emoji, which may be those that are held out.
             if (!c.is_dreambooth() && c.denoise.replay_batches.empty()) source_config(c);
             open_source(held_out_source(c, plan().tasks[0]));
           }},
          {"outputs", [&m, &c] {
             if (m.run().is_coordinator) check_outputs(c, m.run());
           }}};
}

/// Throws what the run would fail by, before anything of it is written.
void check_plan(const RunModels& m) {
  for (const auto& [name, part] : parts_of_plan(m)) part();
}

std::unique_ptr<RunModels> open_models(const RunConfig& c, const RunInfo& run) {
  Phase phase("devices and model folder", run.timing_file);
  auto open = [&] {
    auto models = std::make_unique<RunModels>(c, run, c.model.pretrained_model_name_or_path, Purpose::training);
    check_plan(*models);
    return models;
  };
  processes().leader_first("model", [&] { model_on_this_machine(c.model.pretrained_model_name_or_path); });
  if (c.is_dreambooth()) {
    open();  // and closed: what draws has the devices for itself
    processes().leader_first("class images", [&] { generate_class_images(c, run); });
  }
  auto models = open();
  make_folders(run.folder + "/samples");
  // The config of a run that is there already is replaced when this one is known to start.
  if (!exists(run.folder + "/config.yml")) write_config(run);
  return models;
}

TrainingData open_data(RunModels& models) {
  Phase phase("data", models.run().timing_file);
  return open_training_data(models);
}

/// How an update is made, with the number of updates where keys count epochs.
StepOptions step_options(const RunModels& m, const TrainingData& data) {
  const RunConfig& c = m.config();
  const int64_t update = data.update_size(c.update);
  StepOptions s = planned_step(m, update);
  if (s.optim.max_grad_norm > 0) log_info("gradients are clipped to norm {}", s.optim.max_grad_norm);
  // DreamBooth's few pictures come again and again; of others a batch holds none twice.
  const int64_t samples = data.batches->size();
  check(c.is_dreambooth() || samples <= 0 || data.batch_size() <= samples, Code::invalid_config,
        "a batch is of {} samples, but the data holds {}; give a smaller per_device_batch_size", data.batch_size(),
        samples);
  if (s.optim.max_train_steps > 0) return s;
  check(c.loop.num_train_epochs > 0, Code::invalid_config,
        "You must set max_train_steps or num_train_epochs to a positive integer");
  check(data.batches->size() > 0, Code::invalid_config,
        "max_train_steps is {}, and the number of samples is not known before they are read; give max_train_steps",
        c.optim.max_train_steps);
  s.optim.max_train_steps = std::max<int64_t>(1, c.loop.num_train_epochs * data.batches->size() / update);
  return s;
}

std::vector<const Task*> pointers(const std::vector<DenoiseTask>& tasks) {
  std::vector<const Task*> all;
  for (const DenoiseTask& t : tasks) all.push_back(&t);
  return all;
}

/// Evaluation and samples on the way.
std::vector<Hook> hooks(RunModels& m, const DenoiseTask& task, const LoopOptions& o) {
  const RunConfig& c = m.config();
  std::vector<Hook> all;
  if (c.eval.eval_every > 0) {
    const std::vector<DenoiseTask> experts = of_experts(c, task);
    auto evaluation = std::make_shared<Evaluation>(m.devices(), pointers(experts), held_out_samples(m, task), c.eval,
                                                   o.step, o.seed, c.compile);
    all.push_back({every_steps(c.eval.eval_every), [evaluation](LoopView& v) {
                     v.recorder.read_pending([&] { return evaluation->run(v.at.done, v.state); });
                   }});
  }
  const std::optional<SamplePlan> samples = planned_samples(c, m.run());
  if (samples)
    all.push_back({every_steps_before_the_last(samples->every),
                   [&m](LoopView& v) {
                     v.recorder.flush();
                     write_grid(v.recorder.events(), m, v.at.done,
                                drawn(m, v.programs.params(), trained_values(v.devices, v.programs, v.state)));
                     v.recorder.restart_clock();
                   },
                   true});
  if (samples && samples->after_evaluation)
    all.push_back({every_steps(c.eval.eval_every),
                   [&m, &c](LoopView& v) {
                     v.recorder.flush();
                     const std::string name = m.family()->spec().reference.prefix_of_files(m.run().sample_seed);
                     const HostArray media =
                         drawn(m, v.programs.params(), trained_values(v.devices, v.programs, v.state));
                     write_media(fmt::format("{}/samples/{}-train_steps-{}", m.run().folder, v.at.done, name),
                                 c.sample.output_type == "png" ? "png" : "", media, c.sample.fps);
                     show(v.recorder.events(), m, v.at.done, "eval_samples", media, {});
                     v.recorder.restart_clock();
                   },
                   true});
  return all;
}

/// What processes whose devices are one mesh cannot do yet: none has the trained weights whole.
void check_joint_devices(const RunConfig& c) {
  const auto refuse = [](bool set, const char* key) {
    check(!set, Code::invalid_config,
          "{}: not yet by several processes with GPUs or TPUs, of which none has all weights", key);
  };
  refuse(c.model.train_new_vae, "train_new_vae");
  refuse(c.lora.train_lora, "train_lora");
  refuse(c.is_dreambooth(), "instance_data_dir");
  if (planned_samples(c, {}))
    log_warning(
        "prompt has no effect while processes with GPUs or TPUs train: convert makes a checkpoint a model folder, "
        "which generate draws with");
}

void train_into(const RunConfig& c, const RunInfo& run, const Outputs& outputs) {
  if (!run.has_all_weights) check_joint_devices(c);
  if (run.is_coordinator) report_changed_keys(run);
  const std::unique_ptr<RunModels> opened = open_models(c, run);
  RunModels& models = *opened;
  if (run.is_coordinator) warn_of_ignored_keys(models, "train");
  TrainingData data = open_data(models);
  const std::vector<DenoiseTask> tasks = in_sizes(c, data);

  const double devices = static_cast<double>(models.devices().mesh().devices());  // of one replica, as the task's batch
  if (const auto& tflops = models.family()->spec().reference.tflops)
    log_info(
        "Calculated TFLOPs per pass: {:.4f} (MaxDiffusion's count; ours follows)",
        tflops(models.family()->latent_dims(data.task.size)) * static_cast<double>(data.task.batch_size) / devices);
  const std::vector<std::string> denoisers = trained_denoisers(c, *models.family());
  LoopOptions o = loop_options(models, "", denoisers.size() == 1 ? "train " + denoisers[0] : "train");
  o.step = step_options(models, data);
  write_config(run);
  log_info("***** Running training *****");
  log_info("  Instantaneous batch size per device = {}", static_cast<double>(data.task.batch_size) / devices);
  log_info("  Total train batch size (w. parallel & distributed) = {}", data.update_size(c.update));
  log_info("  Total optimization steps = {}", o.step.optim.max_train_steps);
  o.constants = data.constants;
  o.initial = [&](const ParamTable& params) { return initial_values(models, params); };
  o.complete = [&](CheckpointContent& content, const ParamTable& params, const NamedPieces& trained) {
    complete_checkpoint(models, content, params, trained);
  };
  o.hooks = hooks(models, data.task, o);
  o.flushed = outputs.flushed();
  o.before_commit = outputs.before_commit();

  const std::optional<SamplePlan> samples = planned_samples(c, run);
  const bool compares = samples && samples->compares;
  const HostArray before = compares ? sample_images(models, models.text_encoder(),
                                                    [&](const ParamTable& p, const std::string& component) {
                                                      return as_arrays(models.open_weights(p, component)());
                                                    })
                                    : HostArray();

  if (!samples || (samples->every <= 0 && !samples->after_evaluation)) {
    models.free_text_encoder();
    models.free_autoencoder();
  }
  std::optional<Phase> phase(std::in_place, "training", run.timing_file);
  const Trained t = naming_damaged_weights(
      models, [&] { return train_loop(models.devices(), pointers(tasks), std::move(data.batches), o); });
  phase.reset();
  if (!samples || (samples->every == 0 && !compares)) return;
  const HostArray after = drawn(models, t.params, t.values);
  if (samples->every != 0) {
    std::optional<EventWriter> events;
    if (run.metrics.write_metrics) events.emplace(run.folder + "/tensorboard");
    write_grid(events ? &*events : nullptr, models, t.steps, after);
  }
  if (compares) compare(before, after);
}

/// What a check has found so far.
class Faults {
 public:
  /// Says what `part` throws. Whether it threw nothing.
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
    log_info("check: nothing was found that a run would fail by");
  }

 private:
  int64_t count_ = 0;
  Code first_ = Code::internal;
};

/// Where a run's images are; none: its records hold no images.
std::shared_ptr<const RecordSource> source_of_images(const RunConfig& c) {
  if (c.is_dreambooth())
    return open_source({.dataset_type = "image_folder", .train_data_dir = c.dreambooth.instance_data_dir});
  if (!c.denoise.replay_batches.empty() || c.reads_encoded_records() || c.source.dataset_type == "synthetic") return {};
  return open_source(source_config(c));
}

/// Says how long all captions are and which sizes all images have, with warnings where training has some.
void look_at_all(const RunConfig& c, const Family& family) {
  const std::shared_ptr<const RecordSource> source = source_of_images(c);
  if (!source) return;
  std::vector<std::string> captions;
  int64_t images = 0, small = 0, empty = 0;
  size_t longest = 0;
  std::map<std::pair<int64_t, int64_t>, ImageSize> size_of;  // by pixels and height
  std::string smallest;
  const auto look = [&](const Record& r) {
    captions.push_back(c.is_dreambooth() ? c.dreambooth.instance_prompt : r.caption);
    longest = std::max(longest, captions.back().size());
    empty += captions.back().empty() ? 1 : 0;
    if (r.image.bytes.empty() || family.spec().videos()) return;  // clips say nothing before they are read
    try {
      const ImageSize s =
          decode_stored_image(r.image.bytes.data(), r.image.bytes.size(), r.name, {.only_size = true}).size;
      ++images;
      size_of[{s.height * s.width, s.height}] = s;
      if (std::min(s.height, s.width) >= c.images.resolution) return;
      if (small++ == 0) smallest = fmt::format("{} of {}", r.name, to_string(s));
    } catch (const Error& e) {
      log_warning("{}", e.message());
    }
  };
  for (int64_t i = 0; source->shards() == 0 && i < source->size(); ++i) look(source->read(i));
  for (int64_t shard = 0; shard < source->shards(); ++shard)
    for (const auto reader = source->open(shard, 0);;) {
      const std::optional<PendingRecord> next = reader->next();
      if (!next) break;
      look((*next)());
    }
  log_info("{}: {}, the longest of {}; {} empty", source->name(), counted(std::ssize(captions), "caption"),
           counted(static_cast<int64_t>(longest), "byte"), empty);
  family.tokenize(captions);  // warns of those that are cut
  if (size_of.empty()) return;
  log_info("{}: {} from {} to {}", source->name(), counted(images, "image"), to_string(size_of.begin()->second),
           to_string(size_of.rbegin()->second));
  if (small > 0 && !c.images.bucket_no_upscale)
    log_warning("{} smaller than resolution={} and enlarged; the first is {}",
                small == 1 ? "1 image is" : fmt::format("{} images are", small), c.images.resolution, smallest);
}

/// Traces the training step and opens all weights by name and shape. Of the autoencoder they are read.
void check_weights(RunModels& m, const TrainingData& data) {
  const std::vector<DenoiseTask> tasks = in_sizes(m.config(), data);
  const StepPrograms programs(m.devices(), pointers(tasks), step_options(m, data), "train");
  initial_values(m, programs.params());
  for (const auto& [name, component] : m.folder().components()) {
    const ParamTable params = m.folder().params(name);
    m.open_weights(params, name);
    if (name == m.family()->spec().autoencoder->component) m.autoencoder_values();
    log_info("{}: {} parameters", name, params.count());
  }
}

}  // namespace

void train(const RunConfig& config) {
  join_processes(config.hardware.hardware == "tpu");
  const RunInfo run = make_run_info(config, processes());
  Outputs outputs(run);
  const std::string checkpoints = config.loop.checkpoint_dir.empty() ? run.place : run.checkpoint_dir;
  const bool one_reads = config.hardware.hardware == "cpu" && config.loop.enable_single_replica_ckpt_restoring;
  if (!is_remote(checkpoints) && !one_reads) check_shared(checkpoints);
  train_into(config, run, outputs);
  outputs.finish();
}

void check_run(const RunConfig& c) {
  Faults faults;
  const RunInfo run = make_run_info(c, processes());
  std::unique_ptr<RunModels> models;
  const bool opened = faults.pass("devices and model folder", [&] {
    models = std::make_unique<RunModels>(c, run, c.model.pretrained_model_name_or_path, Purpose::training);
  });
  if (!opened) {
    faults.pass("outputs", [&] { check_outputs(c, run); });
    faults.pass("data", [&] { source_of_images(c); });
    return faults.finish();
  }
  for (const auto& [name, part] : parts_of_plan(*models)) faults.pass(name, part);
  std::optional<TrainingData> data;
  faults.pass("data", [&] {
    data = open_training_data(*models, false);
    for (const auto& [name, a] : data->batches->next()) log_info("first batch: {} {}", name, to_string(a.shape()));
    look_at_all(c, *models->family());
  });
  if (data) faults.pass("weights", [&] { check_weights(*models, *data); });
  faults.pass("the run before", [&] {
    const std::vector<int64_t> steps = list_checkpoints(run.checkpoint_dir);
    if (!steps.empty())
      log_info("it would continue from {}", shown(checkpoint_folder(run.checkpoint_dir, steps.back())));
    report_changed_keys(run);
  });
  faults.finish();
}

}  // namespace md
