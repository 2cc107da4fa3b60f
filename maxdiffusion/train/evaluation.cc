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

Evaluation::Evaluation(const Devices& devices, const Task& task, HeldOut samples, const EvalKeys& keys,
                       const StepOptions& step, uint64_t seed, const CompileConfig& compile_config)
    : devices_(devices), samples_(std::move(samples)) {
  const int64_t most = keys.eval_max_number_of_samples_in_bucket;
  check(most > 0, Code::invalid_config, "eval_max_number_of_samples_in_bucket is {}; expected 1 or more", most);
  check(samples_.count > 0, Code::invalid_config, "eval_data_dir holds no samples");
  const std::optional<TimedLosses> timed = task.timed_losses(samples_.read(0));
  check(timed.has_value(), Code::invalid_config, "eval_every cannot be combined with what this run learns from");
  std::map<int64_t, std::vector<int64_t>> at;  // samples by timestep
  if (samples_.timesteps.empty()) {
    check(!keys.timesteps_list.empty(), Code::invalid_config,
          "timesteps_list is empty: there is nothing to evaluate at");
    for (int64_t t : keys.timesteps_list)
      for (int64_t i = 0; i < std::min(samples_.count, most); ++i) at[t].push_back(i);
  } else {
    for (int64_t i = 0; i < samples_.count; ++i)
      if (auto& there = at[samples_.timesteps.at(static_cast<size_t>(i))]; std::ssize(there) < most) there.push_back(i);
  }
  check(at.begin()->first >= 0 && at.rbegin()->first < timed->num_train_timesteps, Code::invalid_config,
        "{} from {} to {}; timesteps are 0 … {}",
        samples_.timesteps.empty() ? "timesteps_list goes" : "the records of eval_data_dir have timesteps",
        at.begin()->first, at.rbegin()->first, timed->num_train_timesteps - 1);
  for (const auto& [t, there] : at)
    for (int64_t i : there) points_.emplace_back(t, i);

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
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).for_("evaluation");
  const Tensor numbers = g.input("number", {DType::s32, {batch_}}, axis::of_batch(1));
  g.output("losses", timed->losses(models, feed, rng.with_rows(numbers)));
  program_ = std::make_unique<Program>(compile(devices, g, compile_config, "evaluate_" + task.model()));
  key_ = devices.put(key_of_seed(seed));
  log_info("evaluation: {} samples at {} timesteps, {} in all", samples_.count, at.size(), points_.size());
}

std::map<std::string, double> Evaluation::run(int64_t step, TrainState& state) {
  const auto start = std::chrono::steady_clock::now();
  const int64_t total = std::ssize(points_);
  std::map<int64_t, std::pair<double, int64_t>> of_time;  // sum, count
  std::deque<std::pair<int64_t, PendingArray>> pending;   // first point, losses
  auto read = [&] {
    auto [from, losses] = std::move(pending.front());
    pending.pop_front();
    const std::vector<double> v = losses.wait().to_doubles();
    for (int64_t i = 0; i < std::min(batch_, total - from); ++i) {
      auto& [sum, count] = of_time[points_[static_cast<size_t>(from + i)].first];
      sum += v[static_cast<size_t>(i)], ++count;
    }
  };
  ProgressBar bar("evaluation", total);
  for (int64_t from = 0; from < total; from += batch_) {
    // What the last batch lacks is the last sample again.
    HostArrays batch;
    HostArray timesteps(Shape{DType::s32, {batch_}}), numbers(Shape{DType::s32, {batch_}});
    for (int64_t i = 0; i < batch_; ++i) {
      const auto& [t, sample] = points_[static_cast<size_t>(std::min(from + i, total - 1))];
      timesteps.mutable_view<int32_t>()[static_cast<size_t>(i)] = static_cast<int32_t>(t);
      numbers.mutable_view<int32_t>()[static_cast<size_t>(i)] = static_cast<int32_t>(sample);
      for (const auto& [name, one] : samples_.read(sample)) add_rows(batch[name], batch_, i, one);
    }
    batch[kTimesteps] = timesteps.cast(time_type_);
    batch["number"] = numbers;
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
  for (const auto& [t, of] : of_time) {
    const double loss = of.first / static_cast<double>(of.second);
    losses[fmt::format("eval_loss_timestep_{}", t)] = loss;
    mean += loss / static_cast<double>(of_time.size());
    log_info("  Mean eval loss for timestep {}: {:.4f}", t, loss);
  }
  losses["eval_loss"] = mean;
  log_info("Step {}, Final Average Eval loss: {:.4f}", step, mean);
  log_info("Eval time: {:.2f} seconds.",
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return losses;
}

}  // namespace md
