// `compile` and `plan`: what a run's training step takes, by its compiler, before anything of the run is there.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <regex>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/host_memory.h"
#include "maxdiffusion/base/log.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/generate.h"
#include "maxdiffusion/pjrt/platforms.h"
#include "maxdiffusion/pjrt/topology.h"
#include "maxdiffusion/run/train_plan.h"
#include "maxdiffusion/settings/memory_suggestions.h"

namespace md {
namespace {

/// Goes on in a child process, whose exit status becomes this one's. A compiler that meets a program it cannot take may
/// abort the process that it is in; here that becomes an error.
void go_on_in_a_child() {
  std::fflush(nullptr);
  const pid_t child = fork();
  check(child >= 0, Code::device, "compile: no process could be started: {}", std::strerror(errno));
  if (child == 0) return;
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
  if (WIFEXITED(status)) _exit(WEXITSTATUS(status));
  fail(Code::device,
       "compile: the compiler crashed with signal {} ({}); see its lines above. Another mesh, remat_policy or "
       "attention may avoid it",
       WTERMSIG(status), strsignal(WTERMSIG(status)));
}

std::string size(int64_t bytes) {
  const double mib = static_cast<double>(bytes) / (1 << 20);
  return mib < 1024 ? fmt::format("{:.1f} MiB", mib) : fmt::format("{:.2f} GiB", mib / 1024);
}

/// Where the step would run: a topology, or the devices of this machine.
struct Place {
  std::unique_ptr<pjrt::Topology> topology;  // null: devices
  const Devices* devices = nullptr;
  Topology seen;
  Mesh mesh;
  std::optional<int64_t> memory;  // of one device
  const pjrt::PlatformDef* platform = nullptr;

  int64_t count() const { return mesh.devices(); }
  GraphOptions graph_options(const AxisRules& rules) const {
    return topology ? md::graph_options(mesh, seen, &rules) : devices->graph_options(&rules);
  }
  AheadOfTime compile(const Graph& graph, const CompileConfig& config, const std::string& name) const {
    return topology ? compile_ahead(*topology, mesh, graph, config, name)
                    : compile_ahead(*devices, graph, config, name);
  }
};

/// That what is printed of GPUs and of TPUs agrees with `hardware`.
void check_gpu_keys(const HardwareKeys& keys) {
  check(keys.gpu_type.empty() || keys.hardware == "gpu", Code::invalid_config,
        "gpu_type is '{}' and hardware is {}; expected hardware=gpu, or no gpu_type", keys.gpu_type, keys.hardware);
  check(keys.gpu_type.empty() || !keys.topology.empty(), Code::invalid_config,
        "gpu_type is '{}' and topology is empty; expected topology=1x1x8, or no gpu_type for the GPUs of this machine",
        keys.gpu_type);
  if (keys.hardware != "gpu" || keys.topology.empty()) return;
  static const std::regex form("[1-9][0-9]*x[1-9][0-9]*x[1-9][0-9]*");
  check(std::regex_match(keys.topology, form), Code::invalid_config,
        "topology is '{}'; expected numbers such as 1x1x8: one NVLink domain of one host with 8 GPUs", keys.topology);
  check(keys.compile_topology_num_slices <= 1, Code::invalid_config,
        "compile_topology_num_slices is {}; expected 1: of GPUs the first number of topology ('{}') is the number of "
        "domains",
        keys.compile_topology_num_slices, keys.topology);
}

Place place_of(const DeviceRequest& r, const ModelComponents& models) {
  Place p;
  const HardwareKeys& keys = r.hardware;
  check_gpu_keys(keys);
  if (keys.topology.empty()) {
    p.devices = &models.devices();
    p.seen = topology(p.devices->client());
    p.mesh = p.devices->mesh();
    p.platform = &p.devices->client().platform();
    const auto held = p.devices->client().memory(p.mesh.device_ids()[0]);
    if (held && held->limit) p.memory = held->limit;
    if (!p.memory && p.devices->platform() == Platform::cpu) p.memory = memory_limit() / p.count();
    return p;
  }
  const std::string hardware = keys.hardware == "gpu" ? "gpu" : "tpu";
  if (hardware == "tpu") {
    // libtpu would ask the cloud which machine this is, and complain that there is no answer.
    setenv("TPU_SKIP_MDS_QUERY", "1", 0);
    setenv("TPU_ACCELERATOR_TYPE", "v5p-8", 0);
    setenv("TPU_WORKER_HOSTNAMES", "localhost", 0);
  }
  p.topology = std::make_unique<pjrt::Topology>(
      pjrt::Topology::create(hardware, keys.topology, keys.plugin, keys.compile_topology_num_slices, keys.gpu_type));
  p.seen = topology(*p.topology);
  p.mesh = Mesh::make(r.mesh, p.seen);
  p.platform = &pjrt::platform_for(hardware);
  p.memory = p.topology->devices().front().memory_limit;
  return p;
}

/// Whether denoising is looked at, not training.
bool samples(const TrainingRequest& r) { return r.components.devices.hardware.compile_target == "sampling"; }

/// Models are opened on this machine's own device, for their configs, where the step is compiled for others.
ComponentsRequest opened_for(const TrainingRequest& given) {
  ComponentsRequest r = given.components;
  if (samples(given)) r.model.purpose = Purpose::sampling;
  if (!r.devices.hardware.topology.empty()) r.devices.hardware = {}, r.devices.mesh = {};
  return r;
}

/// A run's programs, traced for a place: of its only denoiser, or of each expert.
struct Steps {
  explicit Steps(const TrainingRequest& r)
      : models(opened_for(r)),
        place(place_of(r.components.devices, models)),
        of_sampling(samples(r)),
        encodes(r.data.denoise.cache_latents_text_encoder_outputs),
        compiling(r.components.encoders.compile) {
    const AxisRules rules = axis_rules(r.components.devices, models.family()->spec().axis_rules);
    const GraphOptions placed = place.graph_options(rules);
    if (of_sampling) {
      const SampleOptions o = planned_sampling(models, r.sampling, place.count());
      step.scope = o.scope;
      compiling.minimize_memory = true;
      for (SamplingGraph& s : sampling_graphs(*models.family(), o, placed)) {
        names.push_back(s.denoiser);
        graphs.push_back({std::move(s.graph), std::move(s.params), {}, 0});
        std::vector<Tensor> results;
        for (const GraphOutput& out : graphs.back().graph->outputs()) results.push_back(out.value);
        graphs.back().flops = count_flops(*graphs.back().graph, results);
      }
      return;
    }
    step.scope = models.denoiser_options();  // refuses what the devices cannot quantize
    const TrainPlan plan = plan_training(r, models.folder(), models.family(), {place.count()});
    step = plan.loop.step;
    for (const DenoiseTask& one : plan.tasks) {
      names.push_back(one.model());
      graphs.push_back(trace_step(one, placed, step));
    }
  }
  std::string what(size_t i) const {
    return fmt::format("the {} of {}", of_sampling ? "sampling step" : "training step", names[i]);
  }
  AheadOfTime compile(size_t i) const {
    log_info("compiling {} for {} × {}", what(i), place.count(), place.seen.device_kind);
    // By the names that a run gives, so that it finds them in aot_cache_dir.
    return place.compile(*graphs[i].graph, compiling, of_sampling ? "denoise" : "train_" + names[i]);
  }

  ModelComponents models;
  Place place;
  bool of_sampling, encodes;
  CompileConfig compiling;
  StepOptions step;
  std::vector<std::string> names;  // of the models
  std::vector<StepGraph> graphs;
};

void print_report(const Steps& steps, const AheadOfTime& ahead, double flops) {
  const Place& p = steps.place;
  fmt::print("topology: {} × {}\n", p.count(), p.seen.device_kind);
  fmt::print("mesh: {}\n", p.mesh.describe());
  fmt::print("compiled in {:.1f} s, from {} bytes of StableHLO\n", ahead.report.compile_seconds,
             ahead.report.program_bytes);
  if (ahead.memory) {
    const MemoryPlan& m = *ahead.memory;
    fmt::print("on each device: arguments {}, outputs {} (in the arguments' place {}), temporary {}, code {}\n",
               size(m.arguments), size(m.outputs), size(m.aliased), size(m.temporary), size(m.code));
    if (m.host > 0) fmt::print("in the host's memory for each device: {}\n", size(m.host));
    fmt::print("together {}{}\n", size(m.peak()), p.memory ? fmt::format(" of {}", size(*p.memory)) : "");
  }
  fmt::print("work of a step: {:.4f} TFLOP on each device by the products of the model",
             flops / static_cast<double>(p.count()) / 1e12);
  if (ahead.flops) fmt::print(", {:.4f} by the compiler's count", *ahead.flops / 1e12);
  fmt::print("\n");
  if (ahead.bytes_accessed && ahead.estimated_seconds.value_or(0) > 0)
    fmt::print("by the compiler's count {} read and written, {:.3f} ms; loops as one trip\n",
               size(static_cast<int64_t>(*ahead.bytes_accessed)), *ahead.estimated_seconds * 1e3);
  if (!ahead.products.empty()) {
    std::string products;
    for (const auto& [types, n] : ahead.products)
      products += fmt::format("{}{}: {}", products.empty() ? "" : ", ", types, n);
    fmt::print("products {}\n", products);
  }
  if (ahead.instructions > 0)
    fmt::print("instructions that the program starts: {}, of which {} only change a type\n", ahead.instructions,
               ahead.type_changes);
  if (!ahead.turned.empty()) {
    double bytes = 0;
    for (const pjrt::Turned& t : ahead.turned) bytes += static_cast<double>(t.bytes) * t.times;
    fmt::print("arrays whose axes are put into another order in memory: {}, {}\n", ahead.turned.size(),
               size(static_cast<int64_t>(bytes)));
  }
  if (!ahead.kept.empty()) fmt::print("kept for such devices: {}\n", ahead.kept);
  for (const auto& [target, calls] : ahead.custom_calls)
    fmt::print("custom calls of {}: {} operations, {:g} runs\n", target, calls.operations, calls.runs);
  if (!ahead.collectives) return;
  for (const CollectiveSum& sum : *ahead.collectives)
    fmt::print("{}; most of it {}\n", to_string(sum), largest(sum, 3));
}

// ---- plan

/// Bytes of a graph's inputs on one device, by what they are.
struct Held {
  int64_t trained = 0, frozen = 0, moments = 0, copies = 0, averages = 0, batch = 0, gradients = 0;
};

Held held_by(const StepGraph& s, const Mesh& mesh, const StepOptions& o) {
  Held held;
  std::map<std::string, const Param*> params;
  for (const Param& p : s.params.params()) params[p.input] = &p;
  const std::vector<StateSlot> slots = make_optimizer(o.optim)->slots();
  for (const GraphInput& in : s.graph->inputs()) {
    const int64_t elements = shard_of(mesh, Sharding{in.sharding}, in.value.dims(), 0, in.name).elements();
    const int64_t bytes = elements * static_cast<int64_t>(size_of(in.value.dtype()));
    const auto param = params.find(in.name);
    if (param == params.end()) {
      auto is = [&](const char* prefix) { return in.name.starts_with(prefix); };
      const bool slot = std::ranges::any_of(slots, [&](const StateSlot& k) { return is(k.prefix); });
      (slot                         ? held.moments
       : is(state_prefix::kMaster)  ? held.copies
       : is(state_prefix::kAverage) ? held.averages
                                    : held.batch) += bytes;
    } else if (!param->second->trainable) {
      held.frozen += bytes;
    } else {
      held.trained += bytes;
      const DType type = o.accumulation > 1 ? DType::f32 : in.value.dtype();
      held.gradients += elements * static_cast<int64_t>(std::max(size_of(type), size_of(o.scope.activations)));
    }
  }
  return held;
}

void print_parts(const Held& h, const MemoryPlan& m) {
  const int64_t named = h.trained + h.frozen + h.moments + h.copies + h.averages + h.batch;
  fmt::print(
      "arguments: weights {} trained and {} frozen, moments {}, f32 copies {}, averages {}, batch {}, padding {}\n",
      size(h.trained), size(h.frozen), size(h.moments), size(h.copies), size(h.averages), size(h.batch),
      size(std::max<int64_t>(0, m.arguments - named)));
  fmt::print("temporary: gradients {}, activations and all else {}\n", size(h.gradients),
             size(std::max<int64_t>(0, m.temporary - h.gradients)));
}

/// What the run around the step takes: checkpoints, and making a data set ready.
void print_beside(const Held& h, const Steps& steps, const StepGraph& step) {
  int64_t largest = 0;
  for (const GraphInput& in : step.graph->inputs()) largest = std::max(largest, in.value.shape().bytes());
  const int64_t state = h.trained + h.moments + h.copies + h.averages;
  fmt::print(
      "saving a checkpoint: of {} on each device, {} of the host's memory at a time; all of them where they are free, "
      "to "
      "write while training continues\n",
      size(state), size(largest));
  const int64_t batch = steps.models.options().keys.encoder_batch_size;
  if (steps.encodes)
    fmt::print("encoding a data set: {} of memory at a time in addition to the autoencoder{}\n",
               batch > 0 ? fmt::format("{} samples", batch) : size(steps.models.encoder_bytes()),
               batch > 0 ? "" : ", or what one sample takes");
}

/// Seconds for one kind of message, all devices at once. Rings: what is gathered passes each device once, what is
/// reduced twice, and what is exchanged goes a quarter of the way round.
double seconds_of(const CollectiveSum& sum, const Mesh& mesh, const pjrt::DeviceRates& rates) {
  double n = 1;
  for (const std::string& axis : sum.axes) n *= static_cast<double>(mesh.size(axis));
  const double rate = sum.between_slices ? rates.network : rates.axis, part = (n - 1) / n;
  if (sum.kind == "all-reduce") return 2 * part * sum.bytes / rate;
  if (sum.kind == "all-to-all") return n / 4 * sum.bytes / rate;
  if (sum.kind == "collective-permute") return 2 * sum.bytes / rate;  // one of the two directions
  return part * sum.bytes / rate;
}

void print_roofline(const Steps& steps, const AheadOfTime& ahead, double flops) {
  const Place& p = steps.place;
  const auto rates = p.platform->rates(p.seen.device_kind);
  auto peak = p.platform->peak_flops(p.seen.device_kind, steps.step.scope.activations);
  // TPUs multiply f32 as bf16, unless they are asked for more.
  if (!peak) peak = p.platform->peak_flops(p.seen.device_kind, DType::bf16);
  if (!rates || !peak) {
    fmt::print("predicted step time: no rates are known of {}\n", p.seen.device_kind);
    return;
  }
  const double products = flops / static_cast<double>(p.count()) / *peak;
  double within = 0, between = 0;
  for (const CollectiveSum& sum : ahead.collectives.value_or(std::vector<CollectiveSum>()))
    (sum.between_slices ? between : within) += seconds_of(sum, p.mesh, *rates);
  const double memory = ahead.bytes_accessed.value_or(0) / rates->memory;
  fmt::print(
      "predicted step time: at least {:.4f} s (products {:.4f} at the peak, memory {:.4f}, messages within a slice "
      "{:.4f}, between slices {:.4f}), {:.4f} s where none overlaps\n",
      std::max({products, memory, within, between}), products, memory, within, between,
      products + memory + within + between);
}

/// Throws out_of_memory when a step does not fit a device, as a compiler that knows the device does.
void check_fits(const Steps& steps, size_t i, const AheadOfTime& ahead) {
  const auto& limit = steps.place.memory;
  check(!ahead.memory || !limit || ahead.memory->peak() <= *limit, Code::out_of_memory,
        "{} takes {} on each device, which has {}", steps.what(i), size(ahead.memory ? ahead.memory->peak() : 0),
        size(limit.value_or(0)));
}

AheadOfTime fitting(const Steps& steps, size_t i) {
  AheadOfTime ahead = steps.compile(i);
  check_fits(steps, i, ahead);
  return ahead;
}

TrainingRequest changed(TrainingRequest r, const MemoryKeys& keys) {
  r.components.encoders.layers = keys.layers;
  r.components.devices.mesh = keys.mesh;
  r.data.batches = keys.batches;
  r.sampling.batch = {keys.batches.per_device_batch_size, keys.batches.global_batch_size};
  return r;
}

/// One line for each change up to the first that fits, which becomes a note of `e`.
void try_changes(const TrainingRequest& r, const Place& place, Error& e) {
  const bool offloads = place.seen.platform != "cpu";
  const MemoryKeys keys{r.components.encoders.layers, r.components.devices.mesh, r.data.batches};
  for (const MemorySuggestion& change : memory_suggestions(keys, place.mesh, !samples(r), offloads)) try {
      const Steps steps(changed(r, change.keys));
      int64_t most = 0;
      for (size_t i = 0; i < steps.graphs.size(); ++i) {
        const AheadOfTime ahead = fitting(steps, i);
        if (ahead.memory) most = std::max(most, ahead.memory->peak());
      }
      fmt::print("with {}: it fits, {} on each device\n", change.words, size(most));
      e.note(fmt::format("try: {}", change.words));
      return;
    } catch (const Error& refused) {
      const std::string& why = refused.message();
      fmt::print("with {}: {}\n", change.words, why.substr(0, why.find('\n')));
    }
  e.note("try: more devices, or a smaller model or size; none of the changes above is enough");
}

/// Compiles the training step for the devices of the key `topology`, with no such device here and without weights or
/// data, and prints what it would take there: bytes on each device, work, and what the devices tell each other. Throws
/// invalid_config (no topology, a mesh that does not fit it), device (no compiler for it; the compiler crashed),
/// out_of_memory where the step does not fit a device, with the compiler's numbers.
void compile_for_topology(const TrainingRequest& r) {
  check(!r.components.devices.hardware.topology.empty(), Code::invalid_config,
        "compile: topology is empty; expected the hardware to compile for: topology=v5p:2x2x1, or hardware=gpu "
        "topology=1x1x8 gpu_type=h100");
  go_on_in_a_child();
  const Steps steps(r);
  for (size_t i = 0; i < steps.graphs.size(); ++i) {
    const AheadOfTime ahead = steps.compile(i);
    print_report(steps, ahead, steps.graphs[i].flops);
    check_fits(steps, i, ahead);
  }
}

/// The same for the devices of the keys, which are this machine's where they name no topology. Also prints the parts of
/// the memory, and of a chip whose rates are known the least seconds that a step can take. Where the step does not fit,
/// the changes that commonly help are tried one by one, and out_of_memory says which of them makes it fit.
void plan(const TrainingRequest& r) {
  go_on_in_a_child();
  const Steps steps(r);
  for (size_t i = 0; i < steps.graphs.size(); ++i) {
    const StepGraph& step = steps.graphs[i];
    int64_t trained = 0;
    for (const Param& p : step.params.params())
      if (p.trainable) trained += p.shape.elements();
    fmt::print("{}: {} parameters, of which {} are trained\n", steps.names[i], step.params.count(), trained);
    try {
      const AheadOfTime ahead = fitting(steps, i);
      print_report(steps, ahead, step.flops);
      if (ahead.memory) {
        const Held held = held_by(step, steps.place.mesh, steps.step);
        print_parts(held, *ahead.memory);
        if (!samples(r)) print_beside(held, steps, step);
      }
      print_roofline(steps, ahead, step.flops);
    } catch (Error& e) {
      if (e.code() == Code::out_of_memory) try_changes(r, steps.place, e);
      throw;
    }
  }
}

}  // namespace

Command compile_command() {
  return {"compile", "CONFIG topology=v5p:2x2x1 | hardware=gpu topology=1x1x8 gpu_type=h100 [key=value …]",
          "compile the training step for TPUs or GPUs that are not attached, and report its memory and work",
          [](const Words& words) { compile_for_topology(training_request(config_of("compile", words))); },
          print_all_config_keys};
}

Command plan_command() {
  return {
      "plan", "CONFIG [topology=v5p:2x2x1] [key=value …]",
      "report the memory and time of a training step on each device and, if it does not fit, what would make it fit",
      [](const Words& words) { plan(training_request(config_of("plan", words))); }, print_all_config_keys};
}

}  // namespace md
