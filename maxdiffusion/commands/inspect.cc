// `inspect`: the value of each stage of a run, printed. A stage is a function of the one before it.
#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/inspect.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/train/programs.h"

namespace md {
namespace {

/// A run's training steps, traced: one, or one of each expert.
struct Planned {
  explicit Planned(const RunConfig& c)
      : run(make_run_info(c, processes())),
        models(components_request(c, run)),
        plan(plan_training(c, run, models)),
        steps(models.devices(), pointers(plan.tasks), plan.loop.step, "train") {}
  RunInfo run;
  ModelComponents models;
  TrainPlan plan;
  StepPrograms steps;
};

std::string axes_of(const Sharding& sharding, size_t rank) {
  std::vector<std::string> dims;
  for (size_t d = 0; d < rank; ++d)
    dims.push_back(d < sharding.dims.size() && !sharding.dims[d].empty()
                       ? fmt::format("{}", fmt::join(sharding.dims[d], "×"))
                       : "-");
  return fmt::format("[{}]", fmt::join(dims, ", "));
}

void print_mesh(const RunConfig& c) {
  const Devices devices = open_devices(device_request(c));
  const Topology t = topology(devices.client());
  fmt::print("{}\n", devices.mesh().describe());
  for (const MeshAxis& axis : devices.mesh().axes()) fmt::print("  {}: {}\n", axis.name, axis.size);
  for (int64_t i = 0; i < devices.mesh().devices(); ++i) {
    const int id = devices.mesh().device_ids()[static_cast<size_t>(i)];
    for (const DeviceInfo& d : t.devices)
      if (d.id == id)
        fmt::print("device {} ({}): process {}, slice {}, at [{}]\n", id, t.device_kind, d.process, d.slice,
                   fmt::join(devices.mesh().position(i), ", "));
  }
}

void print_plan(const RunConfig& c) {
  const RunInfo run = make_run_info(c, processes());
  fmt::print("{}", describe(plan_training(c, run, ModelComponents(components_request(c, run)))));
}

void print_params(const RunConfig& c) {
  const Planned run(c);
  std::map<std::string, std::pair<int64_t, int64_t>> counts;  // trained, frozen
  for (const Param& p : run.steps.params().params()) {
    fmt::print("{} {} [{}]{}\n", p.input, to_string(p.shape), fmt::join(p.axes, ", "), p.trainable ? "" : " frozen");
    (p.trainable ? counts[p.model].first : counts[p.model].second) += p.shape.elements();
  }
  for (const auto& [model, n] : counts) fmt::print("{}: {} trained, {} frozen\n", model, n.first, n.second);
}

void print_batch(const RunConfig& c) {
  const Planned run(c);
  for (const BatchField& f : run.steps.step(0).fields)
    fmt::print("{} {}{}\n", f.name, to_string(f.shape), f.batched ? "" : " (the same every step)");
}

void print_graph(const RunConfig& c) {
  const Planned run(c);
  for (size_t i = 0; i < run.steps.count(); ++i) fmt::print("{}", to_stablehlo(*run.steps.step(i).graph, "train"));
}

void print_program(const RunConfig& c) {
  Planned run(c);
  run.steps.compile(c.compile, false);
  for (size_t k = 0; k < run.steps.count(); ++k) {
    const Program& program = run.steps.program(k);
    const CompileReport& r = program.report();
    fmt::print("{} bytes of StableHLO, {} in {:.1f} s\n", r.program_bytes,
               r.from_cache ? "loaded from the cache" : "compiled", r.compile_seconds + r.load_seconds);
    if (const auto flops = program.flops())
      fmt::print("{:.4f} TFLOP a run and device, the compiler's count\n", *flops / 1e12);
    for (size_t i = 0; i < program.input_names().size(); ++i)
      fmt::print("in  {} {} {}\n", program.input_names()[i], to_string(program.input_shape(i)),
                 axes_of(program.input_sharding(i), program.input_shape(i).dims.size()));
    for (const std::string& name : program.output_names()) fmt::print("out {}\n", name);
  }
}

void print_memory(const RunConfig& c) {
  Planned run(c);
  run.steps.compile(c.compile, false);
  for (size_t i = 0; i < run.steps.count(); ++i) {
    const auto plan = run.steps.program(i).memory();
    check(plan.has_value(), Code::device, "this plugin does not say how much memory a program takes");
    const std::string expert = run.steps.count() > 1 ? " of " + run.plan.tasks[i].model() : "";
    fmt::print("training step{}: {}\n", expert, to_string(*plan));
    fmt::print("  arguments {}, outputs {}, of these in the same place {}, temporary {}, code {} bytes\n",
               plan->arguments, plan->outputs, plan->aliased, plan->temporary, plan->code);
    if (const int64_t beside = run.steps.bytes_beside(i); beside > 0)
      fmt::print("  beside them {} bytes of the other models that are trained, {:.2f} GiB in all\n", beside,
                 static_cast<double>(plan->peak() + beside) / (1 << 30));
  }
}

}  // namespace

void inspect(const std::string& what, const RunConfig& c) {
  if (what == "mesh") return print_mesh(c);
  if (what == "plan") return print_plan(c);
  if (what == "params") return print_params(c);
  if (what == "batch") return print_batch(c);
  if (what == "graph") return print_graph(c);
  if (what == "program") return print_program(c);
  if (what == "memory") return print_memory(c);
  fail(Code::invalid_config,
       "inspect: '{}' is not one of: keys, config, mesh, plan, params, batch, graph, program, memory", what);
}

}  // namespace md
