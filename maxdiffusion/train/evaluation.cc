#include "maxdiffusion/train/evaluation.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <set>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_array_rows.h"
#include "maxdiffusion/base/interrupt.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/mesh/logical_axes.h"
#include "maxdiffusion/metrics/progress_bar.h"
#include "maxdiffusion/processes/processes.h"

namespace md {
namespace {

/// Sums over replicas; each value is nonzero in one replica only.
std::vector<double> sum_over_replicas(const std::vector<double>& local_sums) {
  const std::string bytes(reinterpret_cast<const char*>(local_sums.data()), local_sums.size() * sizeof(double));
  std::vector<double> sums(local_sums.size()), of_one(local_sums.size());
  for (const std::string& part : processes().gather("held-out losses", bytes)) {
    check(part.size() == bytes.size(), Code::internal,
          "eval_data_dir: processes have different data; expected the same");
    std::memcpy(of_one.data(), part.data(), part.size());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += of_one[i];
  }
  return sums;
}

}  // namespace

Evaluation::Evaluation(const Devices& devices, const std::vector<const Task*>& tasks, HeldOut samples,
                       const EvalKeys& keys, const StepOptions& step, uint64_t seed,
                       const CompileConfig& compile_config)
    : devices_(devices), samples_(std::move(samples)) {
  const int64_t most = keys.eval_max_number_of_samples_in_bucket;
  check(most > 0, Code::invalid_config, "eval_max_number_of_samples_in_bucket is {}; expected 1 or more", most);
  check(samples_.count > 0, Code::invalid_config, "eval_data_dir holds no samples");
  std::map<int64_t, std::vector<int64_t>> at;  // samples by timestep
  if (samples_.timesteps.empty()) {
    check(!keys.timesteps_list.empty(), Code::invalid_config,
          "timesteps_list is empty; expected one timestep at least");
    for (int64_t t : keys.timesteps_list)
      for (int64_t i = 0; i < std::min(samples_.count, most); ++i) at[t].push_back(i);
  } else {
    for (int64_t i = 0; i < samples_.count; ++i)
      if (auto& points_at = at[samples_.timesteps.at(static_cast<size_t>(i))]; std::ssize(points_at) < most)
        points_at.push_back(i);
  }
  size_t points = 0;
  std::set<int64_t> measured;
  for (const Task* task : tasks) {
    const std::optional<TimedLosses> timed = task->timed_losses(samples_.read(0));
    check(timed.has_value(), Code::invalid_config,
          "eval_every: this run's batches have no loss by timestep; expected -1");
    check(at.begin()->first >= 0 && at.rbegin()->first < timed->num_train_timesteps, Code::invalid_config,
          "{} from {} to {}; timesteps are 0 … {}",
          samples_.timesteps.empty() ? "timesteps_list goes" : "the records of eval_data_dir have timesteps",
          at.begin()->first, at.rbegin()->first, timed->num_train_timesteps - 1);
    Part part;
    for (const auto& [t, of_timestep] : at)
      if (!timed->trains || timed->trains(t))
        for (int64_t i : of_timestep) part.points.emplace_back(t, i), measured.insert(t);
    if (part.points.empty()) continue;
    compile_part(part, *task, *timed, step, compile_config);
    points += part.points.size();
    parts_.push_back(std::move(part));
  }
  check(!parts_.empty(), Code::invalid_config,
        "timesteps_list: none of the timesteps from {} to {} is trained by this run", at.begin()->first,
        at.rbegin()->first);
  if (measured.size() < at.size())
    log_warning(
        "timesteps_list: {} of {} timesteps are not evaluated: they belong to an expert that this run does not train",
        at.size() - measured.size(), at.size());
  key_ = devices.put(key_of_seed(seed));
  log_info("evaluation: {} samples at {} timesteps, {} in all", samples_.count, measured.size(), points);
}

void Evaluation::compile_part(Part& part, const Task& task, const TimedLosses& timed, const StepOptions& step,
                              const CompileConfig& config) const {
  Graph g(devices_.graph_options(&devices_.rules()));
  ParamTable params;
  Feed feed;
  for (const BatchField& f : timed.batch) {
    feed[f.name] = g.input(f.name, f.shape, axis::of_batch(f.shape.dims.size()));
    part.batch = f.shape.dims[0];
    if (f.name == kTimesteps) part.timestep_dtype = f.shape.dtype;
  }
  const Models models = [&](const std::string& component) {
    Scope root(g, params, component, step.scope);
    Scope varied = step.change_scope ? step.change_scope(component, root) : root;
    if (step.ema_decay > 0 && varied.options().trainable)  // the input is the average
      varied = varied.with_source([](const Scope& below, Param p) {
        p.shape.dtype = DType::f32;
        return below.resolve(std::move(p));
      });
    return varied.frozen();
  };
  const Rng rng = Rng(g.input("key", {DType::u32, {2}})).for_("evaluation");
  const Tensor numbers = g.input("number", {DType::s32, {part.batch}}, axis::of_batch(1));
  g.output("losses", timed.losses(models, feed, rng.with_rows(numbers)));
  const std::string name = "evaluate_" + task.model();
  on_coordinator_first(devices_, config, name, [&](const CompileConfig& with) {
    part.program = std::make_unique<Program>(compile(devices_, g, with, name));
  });
}

HostArrays Evaluation::batch_of(const Part& part, int64_t from) const {
  HostArrays batch;
  HostArray timesteps(Shape{DType::s32, {part.batch}}), numbers(Shape{DType::s32, {part.batch}});
  for (int64_t i = 0; i < part.batch; ++i) {
    const auto& [t, sample] = part.points[static_cast<size_t>(std::min(from + i, std::ssize(part.points) - 1))];
    timesteps.mutable_view<int32_t>()[static_cast<size_t>(i)] = static_cast<int32_t>(t);
    numbers.mutable_view<int32_t>()[static_cast<size_t>(i)] = static_cast<int32_t>(sample);
    for (const auto& [name, one] : samples_.read(sample)) add_rows(batch[name], part.batch, i, one);
  }
  batch[kTimesteps] = timesteps.cast(part.timestep_dtype);
  batch["number"] = numbers;
  return batch;
}

std::map<std::string, double> Evaluation::run(int64_t step, TrainState& state) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<double> found;  // for all points, part by part; 0 for points of other replicas
  struct Pending {
    int64_t at, count;  // range in `found`
    PendingArray losses;
  };
  std::deque<Pending> pending;
  auto read = [&] {
    const Pending& p = pending.front();
    const std::vector<double> v = p.losses.wait().to_doubles();
    std::copy_n(v.begin(), p.count, found.begin() + p.at);
    pending.pop_front();
  };
  int64_t total = 0, done = 0;
  for (const Part& part : parts_) total += std::ssize(part.points);
  found.resize(static_cast<size_t>(total));
  int64_t batches = 0;
  ProgressBar bar("evaluation", total);
  for (const Part& part : parts_) {
    const int64_t points = std::ssize(part.points);
    for (int64_t from = 0; from < points; from += part.batch) {
      check_interrupt("the evaluation is left out");
      if (batches++ % devices_.replicas() != devices_.replica()) continue;
      ArrayMap feed;
      place(devices_, *part.program, batch_of(part, from), feed);
      std::vector<Array*> inputs;
      for (const std::string& name : part.program->input_names()) {
        auto field = feed.find(name);
        inputs.push_back(name == "key" ? &key_ : field != feed.end() ? &field->second : state.saved_value(name));
      }
      const std::vector<Array> out = part.program->run(inputs);
      pending.push_back({done + from, std::min(part.batch, points - from), fetch(devices_, out[0])});
      if (pending.size() > 2) read();
      bar.update(done + std::min(from + part.batch, points), "");
    }
    done += points;
  }
  while (!pending.empty()) read();
  bar.finish();

  if (devices_.replicas() > 1) found = sum_over_replicas(found);
  std::map<int64_t, std::pair<double, int64_t>> of_time;  // sum, count
  auto loss_of = found.begin();
  for (const Part& part : parts_)
    for (const auto& [t, sample] : part.points) of_time[t].first += *loss_of++, ++of_time[t].second;
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
