#include "maxdiffusion/train/evaluation.h"

#include <algorithm>
#include <chrono>
#include <deque>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/metrics/progress_bar.h"

namespace md {

Evaluation::Evaluation(const Devices& devices, const Task& task, HostArrays samples, const EvalKeys& keys,
                       const StepOptions& step, uint64_t seed, const CompileConfig& compile_config)
    : devices_(devices), samples_(std::move(samples)), timesteps_(keys.timesteps_list) {
  const std::optional<TimedLosses> timed = task.timed_losses(samples_);
  check(timed.has_value(), Code::invalid_config, "eval_every cannot be combined with what this run learns from");
  check(!timesteps_.empty(), Code::invalid_config, "timesteps_list is empty: there is nothing to evaluate at");
  std::sort(timesteps_.begin(), timesteps_.end());
  check(timesteps_.front() >= 0 && timesteps_.back() < timed->num_train_timesteps, Code::invalid_config,
        "timesteps_list goes from {} to {}; timesteps are 0 … {}", timesteps_.front(), timesteps_.back(),
        timed->num_train_timesteps - 1);
  check(keys.eval_max_number_of_samples_in_bucket > 0, Code::invalid_config,
        "eval_max_number_of_samples_in_bucket is {}; expected 1 or more", keys.eval_max_number_of_samples_in_bucket);
  count_ = std::min(samples_.begin()->second.dims()[0], keys.eval_max_number_of_samples_in_bucket);

  Graph g(devices.graph_options(&devices.rules()));
  ParamTable params;
  Feed feed;
  for (const BatchField& f : timed->batch) {
    feed[f.name] = g.input(f.name, f.shape, axis::of_batch(f.shape.dims.size()));
    batch_ = f.shape.dims[0];
    if (f.name == kTimesteps) time_type_ = f.shape.dtype;
  }
  const Models models = [&](const std::string& component) {
    Scope root(g, params, component, step.scope);
    Scope varied = step.variation ? step.variation(component, root) : root;
    if (step.ema_decay > 0 && varied.options().trainable)  // what comes in is the average
      varied = varied.with_source([](const Scope& below, Param p) {
        p.shape.dtype = DType::f32;
        return below.resolve(std::move(p));
      });
    return varied.frozen();
  };
  g.output("losses", timed->losses(models, feed, Rng(g.input("key", {DType::u32, {2}})).for_("evaluation")));
  program_ = std::make_unique<Program>(compile(devices, g, compile_config, "evaluate_" + task.model()));
  key_ = devices.put(key_of_seed(seed));
  log_info("evaluation: {} pictures at each of {} timesteps", count_, timesteps_.size());
}

std::map<std::string, double> Evaluation::run(int64_t step, TrainState& state) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t total = count_ * static_cast<int64_t>(timesteps_.size());
  std::vector<double> sums(timesteps_.size(), 0);
  std::deque<std::pair<int64_t, PendingArray>> pending;  // first sample, losses
  auto read = [&] {
    auto [from, losses] = std::move(pending.front());
    pending.pop_front();
    const std::vector<double> v = losses.wait().to_doubles();
    for (int64_t i = 0; i < std::min(batch_, total - from); ++i)
      sums[static_cast<size_t>((from + i) / count_)] += v[static_cast<size_t>(i)];
  };
  ProgressBar bar("evaluation", total);
  for (int64_t from = 0; from < total; from += batch_) {
    // Samples of all timesteps one after the other; what the last batch lacks is the last sample again.
    HostArrays batch;
    HostArray timesteps(Shape{DType::s32, {batch_}});
    for (int64_t i = 0; i < batch_; ++i) {
      const int64_t k = std::min(from + i, total - 1);
      timesteps.mutable_view<int32_t>()[static_cast<size_t>(i)] =
          static_cast<int32_t>(timesteps_[static_cast<size_t>(k / count_)]);
      for (const auto& [name, all] : samples_) {
        if (i == 0) batch[name] = rows(all, 0, batch_);
        set_rows(batch[name], i, rows(all, k % count_, 1));
      }
    }
    batch[kTimesteps] = timesteps.cast(time_type_);
    ArrayMap feed;
    place(devices_, *program_, batch, feed);
    std::vector<Array*> inputs;
    for (const std::string& name : program_->input_names()) {
      auto own = feed.find(name);
      inputs.push_back(name == "key" ? &key_ : own != feed.end() ? &own->second : state.saved_value(name));
    }
    const std::vector<Array> out = program_->run(inputs);
    pending.emplace_back(from, fetch(devices_, out[0]));
    if (pending.size() > 2) read();
    bar.update(std::min(from + batch_, total), "");
  }
  while (!pending.empty()) read();
  bar.finish();

  std::map<std::string, double> losses;
  double mean = 0;
  for (size_t i = 0; i < timesteps_.size(); ++i) {
    const double loss = sums[i] / static_cast<double>(count_);
    losses[fmt::format("eval_loss_timestep_{}", timesteps_[i])] = loss;
    mean += loss / static_cast<double>(timesteps_.size());
    log_info("  Mean eval loss for timestep {}: {:.4f}", timesteps_[i], loss);
  }
  losses["eval_loss"] = mean;
  log_info("Step {}, Final Average Eval loss: {:.4f}", step, mean);
  log_info("Eval time: {:.2f} seconds.",
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return losses;
}

}  // namespace md
