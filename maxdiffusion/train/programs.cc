#include "maxdiffusion/train/programs.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/runtime/idle_axes.h"

namespace md {
namespace {

/// How every array of the program's input lies on the mesh, one line each.
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
    const Slice piece = shard_of(devices.mesh(), program.input_sharding(i), shape.dims, 0, name);
    log_info("sharding: {} {} [{}], {} on each device", name, to_string(shape), axes,
             to_string(Shape{shape.dtype, piece.size}));
  }
}

}  // namespace

StepPrograms::StepPrograms(const Devices& devices, const std::vector<const Task*>& tasks, const StepOptions& options,
                           const std::string& title)
    : devices_(devices) {
  for (const Task* t : tasks) {
    graphs_.push_back(trace_step(*t, devices.graph_options(&devices.rules()), options));
    titles_.push_back(title + (t->variant().empty() ? "" : " " + t->variant()));
    names_.push_back("train_" + t->model());
  }
  int64_t trained = 0;
  for (const Param& p : params().params()) trained += p.trainable ? p.shape.elements() : 0;
  log_info("{}: {} parameters in {} arrays, {} of them trained, {:.4f} TFLOP per step and device, mesh {}", titles_[0],
           params().count(), params().params().size(), trained, device_flops(0) / 1e12, devices.mesh().describe());
  for (size_t i = 1; i < count(); ++i)
    log_info("{}: {:.4f} TFLOP per step and device", titles_[i], device_flops(i) / 1e12);
  const Graph& g = *graphs_.front().graph;
  for (const GraphOutput& out : g.outputs())
    if (g.input_index(out.name) >= 0) state_.insert(out.name);
  for (const BatchField& f : graphs_.front().fields)
    if (f.batched) samples_ = f.shape.dims[0];
}

void StepPrograms::compile(const CompileConfig& config, bool log_sharding) {
  for (size_t i = 0; i < count(); ++i) {
    programs_.push_back(md::compile(devices_, *graphs_[i].graph, config, names_[i]));
    warn_of_idle_axes(*graphs_[i].graph, titles_[i]);
    const CompileReport& report = programs_[i].report();
    log_info("{}: program {} in {:.1f} s", titles_[i], report.from_cache ? "loaded from the cache" : "compiled",
             report.compile_seconds + report.load_seconds);
    if (auto plan = programs_[i].memory()) log_info("{}: {}", titles_[i], to_string(*plan));
  }
  if (log_sharding) log_shardings(devices_, any(), params());
}

size_t StepPrograms::choose(const NamedPieces& batch) const {
  if (count() == 1) return 0;
  for (size_t i = 0; i < count(); ++i)
    if (std::ranges::all_of(graphs_[i].fields, [&](const BatchField& f) {
          const auto a = batch.find(f.name);
          return !f.batched || (a != batch.end() && a->second.shape == f.shape);
        }))
      return i;
  std::string shapes;
  for (const auto& [name, a] : batch) shapes += fmt::format(" {} {}", name, to_string(a.shape));
  fail(Code::internal, "no program of {} takes this batch:{}", count(), shapes);
}

double StepPrograms::device_flops(size_t i) const {
  return graphs_[i].flops / static_cast<double>(devices_.mesh().devices());
}

}  // namespace md
