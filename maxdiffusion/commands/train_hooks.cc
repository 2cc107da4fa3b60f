#include "maxdiffusion/commands/train_hooks.h"

#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/metrics/similarity.h"
#include "maxdiffusion/pipelines/denoise_loop.h"
#include "maxdiffusion/run/trained_model.h"
#include "maxdiffusion/run/training_data.h"
#include "maxdiffusion/run/write_media.h"
#include "maxdiffusion/runtime/memory.h"
#include "maxdiffusion/train/evaluation.h"

namespace md {
namespace {

/// Media of the prompts, sampled with the weights trained so far.
HostArray sampled(ModelComponents& m, const TrainPlan& plan, const ParamTable& params, const HostArrays& trained) {
  const WeightsOf weights = weights_with(m, plan, params, trained);
  std::optional<TextEncoder> trained_encoder;
  if (plan.trains_text_encoders)
    trained_encoder.emplace(m.devices(), m.family(), m.text_batch(), weights, scope_options(m.options().layers),
                            m.options().compile);
  HostArray media =
      sample_images(m, plan.samples->sampling, trained_encoder ? *trained_encoder : m.text_encoder(), weights);
  return_freed_memory();  // of their own copy of the denoiser
  return media;
}
HostArray sampled(ModelComponents& m, const TrainPlan& plan, LoopView& v) {
  return sampled(m, plan, v.programs.params(), trained_values(v.devices, v.programs, v.state));
}

/// Writes videos one by one, or `grid` of images, to TensorBoard; `events`: null if nothing is written.
void record_image(EventWriter* events, const TrainPlan& plan, int64_t step, const std::string& tag,
                  const HostArray& media, const HostArray& grid) {
  if (!events) return;
  if (grid) events->image(tag, grid, step);
  for (int64_t i = 0; media.dims().size() == 5 && i < media.dims()[0]; ++i)
    events->video(fmt::format("{}/{}", tag, i), image_of_batch(media, i), plan.samples->sampling.fps, step);
}

void write_grid(EventWriter* events, const TrainPlan& plan, int64_t step, const HostArray& media) {
  const std::string path = fmt::format("{}/samples/step_{:06}", plan.run.folder, step);
  record_image(events, plan, step, "samples", media, write_sample_grid(plan.samples->sampling, media, path));
  log_info("samples of step {}: {}.png", step, path);
}

/// Calls `sample`. Samples that are not finite do not end training: other keys or another autoencoder may be the cause.
/// If the weights have diverged, the next loss is not finite.
template <class F>
void while_training(int64_t step, F&& sample) {
  try {
    sample();
  } catch (const NotFinite& e) {
    log_warning("no samples of step {}: {}", step, e.what());
  }
}

}  // namespace

std::vector<Hook> train_hooks(ModelComponents& m, const TrainPlan& plan) {
  std::vector<Hook> all;
  if (plan.eval) {
    const std::vector<DenoiseTask> experts = tasks_per_expert(plan);
    const EvalKeys& keys = plan.eval->keys;
    const uint64_t seed = keys.eval_seed.is_random() ? plan.loop.seed : keys.eval_seed.value();
    auto evaluation = std::make_shared<Evaluation>(m.devices(), pointers(experts), held_out_samples(m, plan), keys,
                                                   plan.loop.step, seed, plan.loop.compile);
    all.push_back({every_steps(keys.eval_every), [evaluation](LoopView& v) {
                     v.recorder.read_pending([&] { return evaluation->run(v.progress.done, v.state); });
                   }});
  }
  if (!plan.samples) return all;
  all.push_back({every_steps_before_the_last(plan.samples->every),
                 [&m, &plan](LoopView& v) {
                   v.recorder.flush();
                   const int64_t step = v.progress.done;
                   while_training(step, [&] { write_grid(v.recorder.events(), plan, step, sampled(m, plan, v)); });
                   v.recorder.restart_clock();
                 },
                 true});
  if (plan.samples->after_evaluation)
    all.push_back({every_steps(plan.eval ? plan.eval->keys.eval_every : 0),
                   [&m, &plan](LoopView& v) {
                     v.recorder.flush();
                     const SamplingRequest& sampling = plan.samples->sampling;
                     const int64_t step = v.progress.done;
                     while_training(step, [&] {
                       const HostArray media = sampled(m, plan, v);
                       write_media(fmt::format("{}/samples/{}-train_steps-{}", plan.run.folder, step,
                                               m.family()->spec().reference.prefix_of_files(plan.run.sample_seed)),
                                   sampling.output_type == "png" ? "png" : "", media, sampling.fps);
                       record_image(v.recorder.events(), plan, step, "eval_samples", media, {});
                     });
                     v.recorder.restart_clock();
                   },
                   true});
  return all;
}

HostArray samples_before(ModelComponents& m, const TrainPlan& plan) {
  if (!plan.samples || !plan.samples->compares) return {};
  return sample_images(m, plan.samples->sampling, m.text_encoder(), m.weights_of());
}

void write_last_samples(ModelComponents& m, const TrainPlan& plan, const Trained& trained, const HostArray& before) {
  if (!plan.samples || (plan.samples->every == 0 && !plan.samples->compares)) return;
  const HostArray after = sampled(m, plan, trained.params, trained.values);
  if (plan.samples->every != 0) {
    std::optional<EventWriter> events;
    if (plan.run.metrics.write_metrics) events.emplace(plan.run.folder + "/tensorboard");
    write_grid(events ? &*events : nullptr, plan, trained.steps, after);
  }
  if (!plan.samples->compares) return;
  const HostArray a = image_of_batch(before, 0), b = image_of_batch(after, 0);
  log_info("SSIM score after training is {:.6f}", structural_similarity(a, b));
  log_info("PSNR after training is {:.2f} dB", peak_signal_to_noise(a, b));
}

}  // namespace md
