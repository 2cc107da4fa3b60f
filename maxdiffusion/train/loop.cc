#include "maxdiffusion/train/loop.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <future>
#include <utility>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/trace.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/damaged.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/runtime/memory.h"

namespace md {
namespace {

/// Positions of the data before the batches of steps whose loss has not been read yet.
class RecentPositions {
 public:
  void push(int64_t step, Position p) {
    step_ = step;
    positions_.push_back(p);
    if (positions_.size() > 3) positions_.pop_front();
  }
  std::optional<Position> before(int64_t step) const {
    const auto back = static_cast<size_t>(step_ - step);
    if (step > step_ || back >= positions_.size()) return {};
    return positions_[positions_.size() - 1 - back];
  }

 private:
  std::deque<Position> positions_;
  int64_t step_ = 0;  // of the last position
};

/// Whether the loss and the gradient norm of any of the next batches are finite. The device has frozen the state.
bool is_finite_elsewhere(const Devices& devices, const std::function<ArrayMap()>& next_step) {
  constexpr int kBatches = 3;
  const auto finite = [&](const ArrayMap& metrics, const char* name) {
    const auto found = metrics.find(name);
    return found == metrics.end() || std::isfinite(devices.get(found->second).to_doubles()[0]);
  };
  for (int i = 0; i < kBatches; ++i)
    if (const ArrayMap metrics = next_step(); finite(metrics, "loss") && finite(metrics, "grad_norm")) return true;
  return false;
}

/// Renames the checkpoint of a state that has diverged, and says which one the run resumes from.
void set_diverged_aside(const std::string& checkpoint_dir, int64_t step, Error& e) {
  Processes& all = processes();
  if (!all.is_coordinator()) return;
  std::vector<int64_t> saved = list_checkpoints(checkpoint_dir);
  if (!saved.empty() && saved.back() == step) {
    saved.pop_back();
    e.note(fmt::format("its checkpoint is '{}' now", quarantine(checkpoint_dir, step)));
  }
  e.note(saved.empty()
             ? "no checkpoint was written before it"
             : fmt::format("the newest checkpoint before it is {}", checkpoint_folder(checkpoint_dir, saved.back())));
}

/// After a loss that is not finite: the device froze the state before the bad step; its own clock says which. The state
/// is saved if other batches have a finite loss there: otherwise its weights have diverged.
void rescue(const Devices& devices, TrainState& state, const RecentPositions& positions, int64_t first,
            StateSaver& saver, const std::string& checkpoint_dir, const std::function<ArrayMap()>& next_step,
            Error& e) {
  if (!state.arrays.contains("step") || !state.arrays.contains("healthy") ||
      devices.get(state.arrays.at("healthy")).view<uint8_t>()[0] != 0)
    return;
  const int64_t good = devices.get(state.arrays.at("step")).view<int32_t>()[0];
  const auto position = positions.before(good);
  if (!position || good <= first) return;
  try {
    saver.finish();
    if (is_finite_elsewhere(devices, next_step)) {
      saver.save(state, good, *position);
      saver.finish();
      e.note(fmt::format("the state after step {} is saved in {}/{}", good, checkpoint_dir, good));
    } else {
      e.note(
          fmt::format("the state after step {} is not saved: the loss of the next batches is not finite either, so "
                      "the weights have diverged",
                      good));
      set_diverged_aside(checkpoint_dir, good, e);
    }
  } catch (const Error& not_saved) {
    e.note(not_saved.message());
  }
}

/// The error for a run that a signal ended; the state of all finished steps is saved.
Interrupted stopped_after(int64_t done, int64_t saved, int64_t first, const LoopOptions& o) {
  Interrupted e(fmt::format("{}: stopped by {} after step {} of {}", o.title, interrupt_name(), done,
                            o.step.optim.max_train_steps));
  if (saved > 0) e.note(fmt::format("saved in {}/{}; the same command resumes from there", o.checkpoint_dir(), saved));
  if (done == first) e.note("no step was done since the start");
  return e;
}

/// In place of a signal's number: the folder of the run was deleted.
constexpr int kFolderLost = 1 << 10;

/// The signal that ends the run before its next step. Processes agree on it, so that all run the same steps.
int stop_signal(bool folder_lost) {
  Processes& all = processes();
  if (all.alone()) return folder_lost ? kFolderLost : interrupt_signal();
  set_shared_interrupt(static_cast<int>(all.largest("signal", folder_lost ? kFolderLost : local_interrupt_signal())));
  return interrupt_signal();
}

/// The error of a folder that is there no more, with what has become of the state: `save` saves it again.
Error lost_with_state(Error lost, int64_t done, const std::string& checkpoint_dir, const std::function<void()>& save) {
  try {
    if (done > 0) save();
  } catch (const Error& e) {
    return lost.note(fmt::format("the state after step {} is not saved: {}", done, e.message()));
  }
  if (done == 0) return lost.note("no step was done");
  return lost
      .note(fmt::format("the state after step {} is saved in {}/{}; the same command resumes from there", done,
                        checkpoint_dir, done))
      .note("checkpoints, metrics and samples from before are where the folder was moved to, or deleted with it");
}

/// Logs how much device memory was in use, if the plugin reports it.
void log_memory_in_use(const Devices& devices, const std::string& title) {
  int64_t most = 0, limit = 0;
  for (const int64_t position : devices.local()) {
    const auto memory = devices.client().memory(devices.mesh().device_ids()[static_cast<size_t>(position)]);
    if (!memory || memory->peak.value_or(0) <= most) continue;
    most = *memory->peak, limit = memory->limit.value_or(0);
  }
  constexpr double kGib = 1 << 30;
  if (most > 0)
    log_info("{}: at most {:.2f} GiB of the device's {:.2f} were in use", title, static_cast<double>(most) / kGib,
             static_cast<double>(limit) / kGib);
}

}  // namespace

Due every_steps(int64_t n) {
  return [n](const Progress& p) { return n > 0 && p.done % n == 0; };
}

Due every_steps_before_the_last(int64_t n) {
  return [n](const Progress& p) { return n > 0 && p.done % n == 0 && p.done < p.last; };
}

Due every_samples(int64_t n) {
  return [n](const Progress& p) { return n > 0 && p.done * p.samples / n > (p.done - 1) * p.samples / n; };
}

Trained train_loop(const Devices& devices, const std::vector<const Task*>& tasks, std::unique_ptr<Dataset> data,
                   const LoopOptions& o) {
  StepPrograms programs(devices, tasks, o.step, o.title);
  const StateSource from{.checkpoint_dir = o.checkpoint_dir(),
                         .seed = o.seed,
                         .single_replica = o.keys.enable_single_replica_ckpt_restoring,
                         .before_commit = o.before_commit,
                         .also_trained = o.also_trained};
  auto start = std::async(std::launch::async, open_state(devices, programs, o.step, from, o.initial));
  programs.compile(o.compile, o.keys.log_sharding);
  uint64_t bytes_read = 0;
  DataIdentity saved_with;
  TrainState state = [&] {
    HostState host = start.get();
    bytes_read = host.bytes_read;
    saved_with = host.dataset;
    return place_state(devices, programs, std::move(host), o.checkpoint_dir());
  }();
  if (o.begun) o.begun();
  return_freed_memory();  // of the compiler and of initial values
  if (state.step > 0)
    log_info("{}: continues from {}/{}, {:.1f} MB read", o.title, o.checkpoint_dir(), state.step,
             static_cast<double>(bytes_read) / 1e6);
  if (state.step >= o.step.optim.max_train_steps)
    log_line(state.step == o.step.optim.max_train_steps ? LogLevel::info : LogLevel::warning,
             fmt::format("{}: nothing to do: the checkpoint is of step {}, max_train_steps is {}", o.title, state.step,
                         o.step.optim.max_train_steps));
  HostArrays constants = o.constants;
  constants["key"] = key_of_seed(o.seed);
  if (devices.replicas() > 1) constants["replica"] = scalar_s32(devices.replica());
  place(devices, programs.program(0), constants, state.read_only);  // equal in all programs
  if (!o.keys.reuse_example_batch)
    resume_data(*data, o.dataset, state.data, saved_with, checkpoint_folder(o.checkpoint_dir(), state.step));
  data = prefetch(std::move(data), static_cast<int>(o.keys.prefetch_depth));

  const int64_t first = state.step;
  Progress at{first, o.step.optim.max_train_steps, programs.samples()};
  StateSaver saver(devices, programs, o.step, o.checkpoint_dir(), o.keys.checkpoints_to_keep, o.keys.save_optimizer,
                   o.seed, o.complete, o.before_commit, o.dataset, o.also_trained);
  if (!o.keys.save_optimizer && !state_prefixes(*make_optimizer(o.step.optim)).empty())
    log_info("{}: save_optimizer=false: checkpoints have no moments, so a resumed run differs", o.title);
  saver.warn_if_short_of_space(state);
  std::map<std::string, std::string> texts = o.texts;
  texts["num_model_parameters"] = std::to_string(programs.params().count());
  Recorder recorder({.folder = o.folder,
                     .run_name = o.run_name,
                     .title = o.title,
                     .total_steps = at.last,
                     .start_step = first,
                     .samples = at.samples,
                     .device_flops = programs.device_flops(0),
                     .later_device_flops = o.later_device_flops,
                     .device_peak_flops = devices.client().peak_flops(o.step.scope.activations),
                     .config = o.metrics,
                     .texts = std::move(texts),
                     .flushed = o.flushed});
  ProfileWindow profile(devices, o.profile, o.folder + "/tensorboard", first);
  LoopView view{at, devices, programs, state, recorder};
  std::vector<Hook> hooks = {{[&](const Progress& p) { return profile.ends(p.done); },
                              [&](LoopView& v) {
                                v.recorder.read_pending();
                                profile.finish(v.progress.done);
                                v.recorder.restart_clock();
                              }}};
  int64_t saved = first;
  std::optional<Error> lost;  // the folder
  bool has_checkpoints = first > 0;
  const auto look_at_folders = [&] {
    if (lost || !processes().is_coordinator()) return;
    try {
      if (o.check_folder) o.check_folder();
      check(!has_checkpoints || is_remote(o.checkpoint_dir()) || exists(o.checkpoint_dir()), Code::io,
            "'{}' was deleted or moved while this run wrote to it", o.checkpoint_dir());
    } catch (const Error& e) {
      lost = e;
    }
  };
  auto save = [&] {
    try {
      saver.wait();  // for the checkpoint before
      has_checkpoints |= saved > first;
    } catch (const Error&) {
      look_at_folders();
      if (!lost) throw;
    }
    look_at_folders();
    saved = at.done;
    saver.save(state, at.done, state.data);
  };
  const auto save_once = [&] {
    if (saved != at.done) save();
  };
  const Hook checkpoint{every_samples(o.keys.checkpoint_every), [&](LoopView& v) {
                          v.recorder.flush();
                          save_once();
                        }};
  for (bool after_saving : {false, true}) {
    std::ranges::copy_if(o.hooks, std::back_inserter(hooks),
                         [&](const Hook& h) { return h.after_saving == after_saving; });
    if (!after_saving) hooks.push_back(checkpoint);
  }
  const BatchShare share = share_of_program(devices, at.samples / devices.replicas());
  RecentPositions positions;
  NamedShards batch;
  const GracefulStop graceful;
  size_t which = 0;  // program of the last step
  // Runs a step on the next batch, which changes the state's arrays; returns its metrics.
  const auto next_step = [&] {
    Span span("train", state.step);
    if (batch.empty() || !o.keys.reuse_example_batch) {
      Span wait("wait for data");
      for (const auto& [name, rows] : data->next()) batch[name] = share.shards(rows);
    }
    which = programs.choose(batch, o.seed, state.step);
    place(devices, programs.program(which), batch, state.read_only);
    ArrayMap metrics;
    for (auto& [name, a] : programs.program(which).run(state.arrays, state.read_only))
      (programs.is_state(name) ? state.arrays : metrics)[name] = std::move(a);
    return metrics;
  };
  // Whether the run ends before its next step. Looks at the folders before a step that writes into them.
  const auto ends = [&] {
    const Progress next{at.done + 1, at.last, at.samples};
    if (every_steps(o.metrics.log_period)(next) ||
        std::ranges::any_of(hooks, [&](const Hook& hook) { return hook.due(next); }))
      look_at_folders();
    return stop_signal(lost.has_value()) != 0;
  };
  auto steps = [&] {
    while (state.step < at.last && !ends()) {
      positions.push(state.step, state.data);
      profile.before(state.step);
      const ArrayMap metrics = next_step();
      state.data = data->position();
      at.done = ++state.step;
      if (programs.count() > 1) recorder.set_device_flops(programs.device_flops(which));
      recorder.push(at.done, devices, metrics);
      for (const Hook& hook : hooks)
        if (hook.due(at)) hook.run(view);
    }
  };
  try {
    try {
      steps();
    } catch (const Interrupted& e) {  // from a hook; the step before it is complete
      log_info("{}", e.message());
    }
    recorder.flush();
    profile.finish(at.done);
  } catch (Error& e) {
    if (e.code() == Code::io) look_at_folders();
    // Where data or samples cannot be read or written, the state of all finished steps is whole.
    if (!lost && e.code() == Code::io && processes().alone() && saved != at.done) {
      try {
        recorder.read_pending();  // throws if the last loss is not finite
        save();
        saver.finish();
        e.note(fmt::format("the state after step {} is saved in {}/{}; the same command resumes from there", at.done,
                           o.checkpoint_dir(), at.done));
      } catch (const Error& not_saved) {
        e.note(fmt::format("the state after step {} is not saved: {}", at.done, not_saved.message()));
      }
      throw;
    }
    if (!lost || !processes().alone()) {  // the other processes expect another step
      rescue(devices, state, positions, first, saver, o.checkpoint_dir(), next_step, e);
      throw;
    }
  }
  look_at_folders();
  const int stop = stop_signal(lost.has_value());
  if (stop == kFolderLost) {
    if (!lost) lost.emplace(Code::io, "process 0 has lost the folder that this run wrote to");
    throw lost_with_state(*lost, at.done, o.checkpoint_dir(), [&] {
      save();
      saver.finish();
    });
  }
  const bool stopped = stop != 0;
  if (o.keys.save_final_checkpoint || stopped) save_once();
  saver.finish();
  recorder.finish();
  log_memory_in_use(devices, o.title);
  if (stopped) throw stopped_after(at.done, saved, first, o);
  return {programs.params(), last_trained_values(devices, programs, std::move(state)), at.last};
}

}  // namespace md
