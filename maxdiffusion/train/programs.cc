#include "maxdiffusion/train/programs.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/base/parallel.h"
#include "maxdiffusion/processes/processes.h"
#include "maxdiffusion/runtime/unused_mesh_axes.h"

namespace md {
namespace {

/// Logs the sharding of every input of the program, one line each.
void log_shardings(const Devices& devices, const Program& program, const ParamTable& params) {
  for (size_t i = 0; i < program.input_names().size(); ++i) {
    const std::string& name = program.input_names()[i];
    const Shape& shape = program.input_shape(i);
    const Param* p = params.find(name);
    const auto& split = program.input_sharding(i).dims;
    std::string axes;
    for (size_t d = 0; d < shape.dims.size(); ++d)
      axes += fmt::format("{}{}→{}", d ? ", " : "", p && d < p->axes.size() && !p->axes[d].empty() ? p->axes[d] : "-",
                          d < split.size() && !split[d].empty() ? fmt::format("{}", fmt::join(split[d], "×")) : "-");
    const Slice shard = shard_of(devices.mesh(), program.input_sharding(i), shape.dims, 0, name);
    log_info("sharding: {} {} [{}], {} on each device", name, to_string(shape), axes,
             to_string(Shape{shape.dtype, shard.size}));
  }
}

}  // namespace

StepPrograms::StepPrograms(const Devices& devices, const std::vector<const Task*>& tasks, const StepOptions& options,
                           const std::string& title)
    : devices_(devices), tasks_(tasks) {
  StepOptions of_replica = options;
  of_replica.replicas = devices.replicas();
  if (of_replica.replicas > 1 && !title.empty()) processes().open_sums(devices.mesh().devices());
  for (const Task* t : tasks) {
    graphs_.push_back(trace_step(*t, devices.graph_options(&devices.rules()), of_replica));
    titles_.push_back(title + (t->label().empty() ? "" : " " + t->label()));
    names_.push_back("train_" + t->model());
    for (const Param& p : graphs_.back().params.params())
      if (!params_.find(p.input)) params_.add(p);
  }
  for (const StepGraph& s : graphs_)
    for (const GraphOutput& out : s.graph->outputs())
      if (s.graph->input_index(out.name) >= 0) state_.insert(out.name);
  for (const BatchField& f : graphs_.front().fields)
    if (f.batched) samples_ = f.shape.dims[0] * devices.replicas();
  if (title.empty()) return;
  int64_t trained = 0;
  for (const Param& p : params().params()) trained += p.trainable ? p.shape.elements() : 0;
  log_info("{}: {} parameters in {} arrays, {} of them trained, {:.4f} TFLOP per step and device, mesh {}", titles_[0],
           params().count(), params().params().size(), trained, device_flops(0) / 1e12, devices.mesh().describe());
  for (size_t i = 1; i < count(); ++i)
    log_info("{}: {:.4f} TFLOP per step and device", titles_[i], device_flops(i) / 1e12);
}

void StepPrograms::compile(const CompileConfig& config, bool log_sharding) {
  // Half of the compiler's work on a program is single-threaded, and memory that it uses is not returned.
  constexpr int64_t kTogether = 2;
  const auto n = static_cast<int64_t>(count());
  std::vector<std::optional<Program>> compiled(count());
  const auto make = [&](const CompileConfig& with, int64_t at) {
    const auto i = static_cast<size_t>(at);
    compiled[i].emplace(md::compile(devices_, *graphs_[i].graph, with, names_[i]));
    const CompileReport& report = compiled[i]->report();
    log_info("{}: program {} in {:.1f} s", titles_[i], report.from_cache ? "loaded from the cache" : "compiled",
             report.compile_seconds + report.load_seconds);
  };
  on_coordinator_first(devices_, config, "compile " + titles_[0], [&](const CompileConfig& with) {
    parallel_for(
        n, [&](int64_t i, int) { make(with, i); }, static_cast<int>(std::min(n, kTogether)));
  });
  for (size_t i = 0; i < count(); ++i) {
    programs_.push_back(std::move(*compiled[i]));
    warn_of_unused_mesh_axes(*graphs_[i].graph, titles_[i]);
    if (auto plan = programs_[i].memory()) log_info("{}: {}", titles_[i], to_string(*plan));
  }
  for (size_t i = 0; i < count(); ++i)
    if (const int64_t bytes = bytes_of_other_programs(i); bytes > 0)
      log_info("{}: the run's other models take {:.2f} GiB more on each device", titles_[i],
               static_cast<double>(bytes) / (1 << 30));
  std::set<std::string> logged;
  for (size_t i = 0; log_sharding && i < count(); ++i)
    if (logged.insert(tasks_[i]->model()).second) log_shardings(devices_, programs_[i], params());
}

size_t StepPrograms::choose(const NamedShards& batch, uint64_t seed, int64_t step) const {
  if (count() == 1) return 0;
  std::vector<size_t> candidates;
  double all = 0;
  for (size_t i = 0; i < count(); ++i) {
    const bool fits = std::ranges::all_of(graphs_[i].fields, [&](const BatchField& f) {
      const auto a = batch.find(f.name);
      return !f.batched || (a != batch.end() && a->second.shape == f.shape);
    });
    if (!fits || !tasks_[i]->accepts(batch)) continue;
    candidates.push_back(i);
    all += tasks_[i]->sampling_weight();
  }
  std::string shapes;
  for (const auto& [name, a] : batch) shapes += fmt::format(" {} {}", name, to_string(a.shape));
  check(!candidates.empty(), Code::internal, "none of {} programs accepts this batch:{}", count(), shapes);
  if (candidates.size() == 1) return candidates[0];
  double left = HostRng(seed, "turn").uniform(static_cast<uint64_t>(step)) * all;
  for (size_t i : candidates)
    if ((left -= tasks_[i]->sampling_weight()) < 0) return i;
  return candidates.back();
}

int64_t StepPrograms::bytes_of_other_programs(size_t i) const {
  std::set<std::string> seen;
  auto see = [&](const StepGraph& s) {
    int64_t bytes = 0;
    for (const GraphInput& in : s.graph->inputs()) {
      const bool of_batch = std::ranges::any_of(s.fields, [&](const BatchField& f) { return f.name == in.name; });
      if (of_batch || !seen.insert(in.name).second) continue;
      const Dims shard = shard_of(devices_.mesh(), {in.sharding}, in.value.dims(), 0, in.name).size;
      bytes += Shape{in.value.dtype(), shard}.bytes();
    }
    return bytes;
  };
  see(graphs_[i]);
  int64_t bytes = 0;
  for (const StepGraph& s : graphs_) bytes += see(s);
  return bytes;
}

double StepPrograms::device_flops(size_t i) const {
  return graphs_[i].flops / static_cast<double>(devices_.mesh().devices());
}

}  // namespace md
