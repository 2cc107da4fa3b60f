#include "maxdiffusion/commands/train.h"

#include <memory>
#include <optional>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/this_machine.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/commands/train_hooks.h"
#include "maxdiffusion/run/environment.h"
#include "maxdiffusion/run/outputs.h"
#include "maxdiffusion/run/phase.h"
#include "maxdiffusion/run/shared_folder.h"
#include "maxdiffusion/run/trained_model.h"
#include "maxdiffusion/run/training_data.h"
#include "maxdiffusion/settings/changed_keys.h"
#include "maxdiffusion/storage/write.h"

namespace md {
namespace {

void write_config(const RunInfo& run) {
  if (!run.is_coordinator) return;
  make_folders(run.folder + "/samples");
  write_file_atomic(run.folder + "/config.yml", run.config_yaml);
  if (!run.config_copy.empty()) put_text(run.config_copy, run.config_yaml);
}

/// Throws io if each process reads checkpoints but they do not see the same folder.
void check_shared_checkpoints(const TrainingRequest& r) {
  const LoopKeys& keys = r.learning.loop;
  const std::string& folder = keys.checkpoint_dir.empty() ? r.run.place : r.run.checkpoint_dir;
  const bool one_reads = r.components.devices.hardware.hardware == "cpu" && keys.enable_single_replica_ckpt_restoring;
  if (!is_remote(folder) && !one_reads) check_shared(folder);
}

/// Checks a run's folder, which may have files of an earlier start.
void check_before(const TrainingRequest& r) {
  check_shared_checkpoints(r);
  if (r.run.is_coordinator) report_changed_keys(r.run);
}

struct OpenedRun {
  std::unique_ptr<ModelComponents> models;
  TrainPlan plan;
};
/// Opens the models and plans the run. Throws errors that can be found before data is read, before any file of the run
/// is written.
OpenedRun open_models(const TrainingRequest& r) {
  auto models = std::make_unique<ModelComponents>(r.components);
  TrainPlan plan = plan_training(r, *models);
  if (plan.samples) check_samples_of_run(*models, plan.samples->sampling);
  if (plan.eval) check_held_out(plan);
  check_trained_weights(*models, plan);
  if (r.run.is_coordinator) check_outputs(r.run, plan.data.cache.folder);
  return {std::move(models), std::move(plan)};
}

OpenedRun open_run(const TrainingRequest& r) {
  std::optional<Phase> phase(std::in_place, "devices and model folder", r.run.timing_file);
  processes().coordinator_first("model",
                                [&] { model_on_this_machine(r.components.model.keys.pretrained_model_name_or_path); });
  if (!r.data.dreambooth.instance_data_dir.empty()) {
    open_models(r);  // and closes them, so that class image generation has the devices alone
    processes().coordinator_first("class images", [&] { generate_class_images(r); });
  }
  OpenedRun opened = open_models(r);
  phase.reset();
  if (r.run.is_coordinator) r.rules.warn_of_ignored(opened.models->opened(), "train");
  return opened;
}

/// Whether data is encoded when it is opened, which may take hours: what can be refused is refused before it.
bool encodes(const TrainPlan& plan) {
  return plan.data.mode == DataMode::cached_latents || plan.data.mode == DataMode::dreambooth;
}

TrainingData open_data(ModelComponents& models, const TrainPlan& plan) {
  check_same_data(plan.data);
  std::optional<StateInfo> resumed;
  if (encodes(plan)) resumed = check_start(models, plan);
  const Phase phase("data", plan.run.timing_file);
  if (plan.run.is_coordinator && encodes(plan)) begin_used_items(plan.data.cache);
  return open_training_data(models, plan, resumed);
}

void log_plan(const ModelComponents& models, const TrainPlan& plan) {
  const double devices = static_cast<double>(models.devices().mesh().devices());  // of one replica, as the task's batch
  const double on_each = static_cast<double>(plan.task.batch_size) / devices;
  const OptimConfig& optim = plan.loop.step.optim;
  if (const auto& tflops = models.family()->spec().reference.tflops)
    log_info("Calculated TFLOPs per pass: {:.4f} (MaxDiffusion's count; ours follows)",
             tflops(models.family()->latent_dims(plan.task.size)) * on_each);
  if (optim.max_grad_norm > 0) log_info("gradients are clipped to norm {}", optim.max_grad_norm);
  log_info("***** Running training *****");
  log_info("  Instantaneous batch size per device = {}", on_each);
  log_info("  Total train batch size (w. parallel & distributed) = {}", plan.update_size());
  log_info("  Total optimization steps = {}", optim.max_train_steps);
}

/// The plan completed from the data.
TrainPlan planned_with(const TrainPlan& plan, ModelComponents& models, const TrainingData& data) {
  TrainPlan whole = with_data(plan, data.task, data.buckets, data.batches->size());
  if (!encodes(plan)) check_start(models, whole);
  log_plan(models, whole);
  return whole;
}

/// Runs the loop with its hooks, and samples before and after it.
void run_loop(ModelComponents& models, const TrainPlan& plan, TrainingData data, const Outputs& outputs) {
  LoopOptions o = plan.loop;
  o.dataset = data.dataset;
  o.constants = data.constants;
  o.initial = [&](const ParamTable& params) { return initial_values(models, plan, params); };
  o.complete = [&](CheckpointContent& content, const ParamTable& params, const NamedShards& trained) {
    complete_checkpoint(models, plan, content, params, trained);
  };
  o.hooks = train_hooks(models, plan);
  if (plan.run.is_coordinator && encodes(plan)) {
    forget_used_items(plan.data.cache);
    report_unused_items(plan.data.cache);
  }
  o.flushed = outputs.flushed();
  o.before_commit = outputs.before_commit();
  const HostArray before = samples_before(models, plan);
  if (!plan.samples || (plan.samples->every <= 0 && !plan.samples->after_evaluation)) {
    models.free_text_encoder();
    models.free_autoencoder();
  }
  std::optional<Phase> phase(std::in_place, "training", plan.run.timing_file);
  const Trained trained = naming_damaged_weights(
      models, [&] { return train_loop(models.devices(), pointers(plan.tasks), std::move(data.batches), o); });
  phase.reset();
  write_last_samples(models, plan, trained, before);
}

}  // namespace

void train(const TrainingRequest& request) {
  const double begun = seconds_since_1970();
  Outputs outputs(request.run);
  check_before(request);
  auto [models, planned] = open_run(request);
  // When the first loop has its state, nothing is refused any more; until then nothing of the run is written.
  planned.loop.begun = [&request, &devices = models->devices(), begun, started = std::make_shared<bool>()] {
    if (std::exchange(*started, true)) return;
    write_config(request.run);
    record_start(request.run, devices, begun);
  };
  // A new folder of that name has the config of the run, too.
  planned.loop.check_folder = [&] {
    try {
      outputs.check_folder();
    } catch (const Error&) {
      write_config(request.run);
      throw;
    }
  };
  TrainingData data = open_data(*models, planned);
  const TrainPlan plan = planned_with(planned, *models, data);
  run_loop(*models, plan, std::move(data), outputs);
  outputs.finish();
}

Command train_command() {
  return {"train",
          kConfigArguments,
          "train a model as the config says; a run that exists resumes from its newest checkpoint",
          [](const Words& words) { train(training_request(config_of("train", words), true)); },
          print_all_config_keys,
          true};
}

}  // namespace md
