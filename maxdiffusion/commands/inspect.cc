// `inspect`: prints the value of each stage of a run. A stage is a function of the previous one.
#include <fmt/ranges.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/graph/emit.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/settings/foreign_image.h"
#include "maxdiffusion/train/programs.h"

namespace md {
namespace {

/// A run's traced training steps: one, or one for each expert.
struct Planned {
  explicit Planned(const TrainingRequest& r)
      : models(r.components),
        plan(plan_training(r, models)),
        steps(models.devices(), pointers(plan.tasks), plan.loop.step, "train") {}
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

void print_mesh(const TrainingRequest& r) {
  const Devices devices = open_devices(r.components.devices);
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

void print_plan(const TrainingRequest& r) {
  fmt::print("{}", describe(plan_training(r, ModelComponents(r.components))));
}

void print_params(const TrainingRequest& r) {
  const Planned run(r);
  std::map<std::string, std::pair<int64_t, int64_t>> counts;  // trained, frozen
  for (const Param& p : run.steps.params().params()) {
    fmt::print("{} {} [{}]{}\n", p.input, to_string(p.shape), fmt::join(p.axes, ", "), p.trainable ? "" : " frozen");
    (p.trainable ? counts[p.model].first : counts[p.model].second) += p.shape.elements();
  }
  for (const auto& [model, n] : counts) fmt::print("{}: {} trained, {} frozen\n", model, n.first, n.second);
}

void print_batch(const TrainingRequest& r) {
  const Planned run(r);
  for (const BatchField& f : run.steps.step(0).fields)
    fmt::print("{} {}{}\n", f.name, to_string(f.shape), f.batched ? "" : " (the same every step)");
}

void print_graph(const TrainingRequest& r) {
  const Planned run(r);
  for (size_t i = 0; i < run.steps.count(); ++i) fmt::print("{}", to_stablehlo(*run.steps.step(i).graph, "train"));
}

void print_program(const TrainingRequest& r) {
  Planned run(r);
  run.steps.compile(r.components.encoders.compile, false);
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

void print_memory(const TrainingRequest& r) {
  Planned run(r);
  run.steps.compile(r.components.encoders.compile, false);
  for (size_t i = 0; i < run.steps.count(); ++i) {
    const auto plan = run.steps.program(i).memory();
    check(plan.has_value(), Code::device, "memory: this plugin does not report how much memory a program takes");
    const std::string expert = run.steps.count() > 1 ? " of " + run.plan.tasks[i].model() : "";
    fmt::print("training step{}: {}\n", expert, to_string(*plan));
    fmt::print("  arguments {}, outputs {}, of these in the same place {}, temporary {}, code {} bytes\n",
               plan->arguments, plan->outputs, plan->aliased, plan->temporary, plan->code);
    if (const int64_t others = run.steps.bytes_of_other_programs(i); others > 0)
      fmt::print("  in addition {} bytes of the other models that are trained, {:.2f} GiB in all\n", others,
                 static_cast<double>(plan->peak() + others) / (1 << 30));
  }
}

/// Prints the settings in a PNG file.
void print_image(const Words& words) {
  check(words.size() == 2, Code::invalid_config, "inspect image: expected one PNG file; try: {} inspect image FILE.png",
        program_name());
  const std::string bytes = read_file(words[1]);
  const PngTexts texts = png_texts({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()}, words[1]);
  if (texts.empty()) fmt::print("{} says nothing of how it was made\n", words[1]);
  for (const auto& [keyword, text] : texts) fmt::print("{}:\n{}{}", keyword, text, text.ends_with('\n') ? "" : "\n");
  if (texts.contains(kImageSettings)) return;
  const std::optional<ForeignSettings> theirs = foreign_settings(texts, words[1]);
  if (!theirs) return;
  fmt::print("as keys:\n");
  for (const auto& [key, value] : theirs->keys) fmt::print("{}: {}\n", key, value);
  if (!theirs->unused.empty()) fmt::print("without a key: {}\n", fmt::join(theirs->unused, ", "));
}

void inspect_stage(const std::string& what, const TrainingRequest& r) {
  if (what == "mesh") return print_mesh(r);
  if (what == "plan") return print_plan(r);
  if (what == "params") return print_params(r);
  if (what == "batch") return print_batch(r);
  if (what == "graph") return print_graph(r);
  if (what == "program") return print_program(r);
  if (what == "memory") return print_memory(r);
  fail(Code::invalid_config,
       "inspect: '{}' is not one of: keys, config, image, mesh, plan, params, batch, graph, program, memory", what);
}

void inspect(const Words& words) {
  if (words == Words{"keys", "--markdown"}) return print_key_reference();
  if (words == Words{"keys"})
    return print_all_config_keys([](const char*, const KeyList& keys) {
      for (const ConfigKey& key : keys.keys()) fmt::print("{}\n", key.line());
    });
  check(!words.empty(), Code::invalid_config,
        "inspect: expected what to print; try: {0} inspect keys, or: {0} inspect config configs/quickstart.yml",
        program_name());
  if (words[0] == "image") return print_image(words);
  const std::string command = "inspect " + words[0];
  const Words config(words.begin() + 1, words.end());
  if (words[0] == "config") return fmt::print("{}", config_of(command.c_str(), config).to_yaml());
  inspect_stage(words[0], training_request(config_of(command.c_str(), config)));
}

}  // namespace

Command inspect_command() {
  return {
      "inspect",
      "keys [--markdown] | image FILE.png | config|mesh|plan|params|batch|graph|program|memory CONFIG [key=value …]",
      "print every key with its default and meaning, or one stage of a run", inspect, print_all_config_keys};
}

}  // namespace md
